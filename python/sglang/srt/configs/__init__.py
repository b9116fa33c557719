"""What a checkpoint says about its model, read without torch.

Owns the GGUF header, the way from a model name to a path, and the model's shape words; import the module you
need. It must not import arg_groups, server_args or torch.
"""

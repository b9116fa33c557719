"""What a checkpoint says about its model, read without torch.

Owns the way from a model name to its files, the config and the GGUF header. It must not import arg_groups,
server_args or torch.
"""

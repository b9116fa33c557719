"""From files to weights.

Owns the readers of checkpoint formats (GGUF, safetensors, dummy) and the load with its progress; import the
module you need. Read by the model runner. It must not know how a model lays out its parameters: it hands out
named tensors.
"""

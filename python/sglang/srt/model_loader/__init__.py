"""Readers of checkpoint formats (GGUF, safetensors, dummy) and the loading of a model from them.

Read by the model runner. It must not know how a model lays out its parameters: it hands out named tensors.
"""

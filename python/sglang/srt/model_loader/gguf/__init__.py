"""GGUF tensors to weights: names, blocks, reader."""

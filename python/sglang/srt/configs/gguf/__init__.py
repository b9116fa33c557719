"""The header of a GGUF file and what it says about the model."""

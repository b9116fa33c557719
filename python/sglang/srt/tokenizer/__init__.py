"""Text to token ids and back.

Owns loading of tokenizers (Hugging Face folders, GGUF metadata), chat templates and the bytes of a token.
Read by the server process, the detokenizer and the scheduler (stop strings); import the module you need.
It must not import torch or transformers.
"""

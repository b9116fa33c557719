"""The config of Llama and of the many models of its shape (Mistral, SmolLM2, ...)."""

from sglang.srt.configs.architectures.decoder import Architecture, read_decoder

ARCHITECTURE = Architecture(name="LlamaForCausalLM", model_type="llama", gguf_name="llama", read=read_decoder)

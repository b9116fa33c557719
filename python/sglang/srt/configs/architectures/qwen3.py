"""The config of Qwen3: a decoder whose head size does not follow from the hidden size."""

from sglang.srt.configs.architectures.config_values import ConfigValues
from sglang.srt.configs.architectures.decoder import Architecture, DecoderShape, read_decoder


def read(config: ConfigValues) -> DecoderShape:
    return read_decoder(config, default_head_dim=128)


ARCHITECTURE = Architecture(name="Qwen3ForCausalLM", model_type="qwen3", gguf_name="qwen3", read=read)

"""Owns which class serves which architecture name.

Read by the model runner. The names must be those that the model config accepts; a difference is an error at
import.
"""

from __future__ import annotations

from sglang.srt.configs.architectures import ARCHITECTURES
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[DecoderForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}

if set(MODELS) != set(ARCHITECTURES):
    raise ImportError(f"models {sorted(MODELS)} differ from what a config may name: {sorted(ARCHITECTURES)}")


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class of an architecture."""
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not served; known are {', '.join(MODELS)}")
    return MODELS[architecture]

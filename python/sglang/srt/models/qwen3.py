"""Owns the Qwen3 architecture: the decoder with a norm over each query and key head.

Reached through the registry. Its head size is independent of the hidden size, which the config says.
"""

from __future__ import annotations

from sglang.srt.models.common.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with query and key norms."""

    head_norms = True

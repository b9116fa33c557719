"""Owns the Llama architecture (Llama 1 to 3, SmolLM2 and others that say `LlamaForCausalLM`).

Reached through the registry. It is the plain decoder: nothing differs.
"""

from __future__ import annotations

from sglang.srt.models.common.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder with the parts that its makers make."""

"""Owns the map from names of GGUF tensors to those of Hugging Face checkpoints, for served architectures.

Read by the GGUF reader only. It must not touch data.
"""

from __future__ import annotations

import re

from sglang.srt.configs.gguf.config import ROPE_FACTORS_TENSOR

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOP = re.compile(r"([a-z_]+)\.(weight|bias)")

# Read by the model config, so no parameter waits for them.
CONFIG_TENSORS = frozenset({ROPE_FACTORS_TENSOR})


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None when no served architecture has such a tensor."""
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        inner = _IN_LAYER.get(part)
        return None if inner is None else f"model.layers.{layer}.{inner}.{kind}"
    match = _TOP.fullmatch(name)
    outer = _OUTSIDE.get(match.group(1)) if match is not None else None
    return None if match is None or outer is None else f"{outer}.{match.group(2)}"

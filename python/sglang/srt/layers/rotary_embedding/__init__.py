"""Rotary position embedding: frequencies by kind of scaling, and their application."""

from __future__ import annotations

import torch

from sglang.srt.configs.architectures.rope_scaling import Llama3Scaling
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding, apply_rotary
from sglang.srt.layers.rotary_embedding.llama3 import Llama3RotaryEmbedding

__all__ = ["RotaryEmbedding", "apply_rotary", "get_rope"]


def get_rope(
    head_dim: int, theta: float, scaling: Llama3Scaling | None, dtype: torch.dtype
) -> RotaryEmbedding:
    """The embedding for a model's `rope_scaling` (None: plain)."""
    kind = "default" if scaling is None else scaling.get("rope_type", "default")
    if kind == "default":
        return RotaryEmbedding(head_dim, theta, dtype)
    if kind == "llama3":
        assert scaling is not None
        return Llama3RotaryEmbedding(head_dim, theta, dtype, scaling)
    raise ValueError(f"rope scaling of type {kind!r} is not served yet; known are default and llama3")

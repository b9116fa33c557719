"""Owns the call of the attention back end from a model: one per layer, without weights.

Read by models and by back ends (heads, scale, layer number). It must not know pages or batches: the back end
of the running forward does.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.batch.forward_context import ForwardContext


class RadixAttention(nn.Module):
    """Attention over the paged cache of one layer."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.layer_id = layer_id

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q [rows, heads, dim], k and v [rows, kv heads, dim] -> [rows, heads * dim]."""
        assert ctx.plan is not None  # an idle replica skips attention
        return ctx.attn_backend.forward(q, k, v, self, ctx.plan)

"""Owns plain rotary embedding: cosines and sines of a batch's positions, and their application to heads.

Read by models, which call `forward(positions)` once a forward and `apply_rotary` once a layer. It keeps no
table: a few operations a forward cost less than a table of the whole context. Angles are float32 whatever the
model's type.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.kernels.compiled_for import kernels_for

#: Cosines and signed sines of a batch, each [rows, 1, head_dim].
CosSin = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding(nn.Module):
    """Frequencies theta^(-2i / head_dim); dimension i is rotated with dimension i + head_dim / 2."""

    frequencies: torch.Tensor

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embedding needs an even one")
        self.head_dim = head_dim
        self.theta = theta
        self.dtype = dtype
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def _frequencies(self) -> torch.Tensor:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return 1.0 / (self.theta**exponents)

    def forward(self, positions: torch.Tensor) -> CosSin:
        """positions [rows] -> what `apply_rotary` takes."""
        cos = self.frequencies.new_empty(positions.shape[0], 1, self.head_dim, dtype=self.dtype)
        kernels = kernels_for(cos)
        if kernels is None:
            return self._in_torch(positions)
        sin = torch.empty_like(cos)
        kernels.elementwise.rotary_cos_sin(positions.contiguous(), self.frequencies, cos, sin)
        return cos, sin

    def _in_torch(self, positions: torch.Tensor) -> CosSin:
        angles = torch.outer(positions.float(), self.frequencies)  # [rows, head_dim / 2]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def apply_rotary(heads: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate heads [rows, heads, head_dim]; may work in place: use what is returned.

    With the sign in the sine, (x1 cos - x2 sin, x2 cos + x1 sin) is x * cos + swap(x) * sin: three
    operations.
    """
    cos, sin = cos_sin
    kernels = kernels_for(heads)
    if kernels is not None:
        rotated: torch.Tensor = kernels.elementwise.rotate_heads(heads, cos, sin)
        return rotated
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).addcmul_(swapped, sin)

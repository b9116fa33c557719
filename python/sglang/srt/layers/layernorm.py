"""Owns RMSNorm, alone and fused with the residual addition before it.

Read by models. It must not keep activations; sums are taken in float32 whatever the type of the model.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.srt.layers.parameter import LoadableParameter, Place


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    floor: torch.Tensor

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = LoadableParameter(
            torch.empty(size, dtype=dtype), [Place.full(f"{name}.weight", (size,))]
        )
        self.root = math.sqrt(size)
        # sqrt(mean(x^2) + eps) = hypot(norm(x), sqrt(size * eps)) / sqrt(size): the norm is one reduction,
        # and F.rms_norm runs as six operations on CPU.
        self.register_buffer("floor", torch.tensor(math.sqrt(size * eps)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = self.root / torch.hypot(norm, self.floor)
        return (x * scale).to(x.dtype).mul_(self.weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual stream in place and return the normalised stream."""
        return self.forward(residual.add_(x))

"""Owns RMSNorm, alone and after the addition to the residual stream.

Read by models. It must not keep activations; sums are taken in float32 whatever the type of the model.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.srt.layers.weights.parameter import LoadableParameter, Place


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    sqrt(mean(x^2) + eps) is hypot(norm(x), sqrt(size * eps)) / sqrt(size), and sqrt(size) goes into the
    weight: four operations, where F.rms_norm takes twice as long on CPU.
    """

    floor: torch.Tensor
    scaled: torch.Tensor

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = LoadableParameter(
            torch.empty(size, dtype=dtype), [Place.full(f"{name}.weight", (size,))], on_filled=self._scale
        )
        self.root = math.sqrt(size)
        self.register_buffer("floor", torch.tensor(math.sqrt(size * eps)), persistent=False)
        self.register_buffer("scaled", torch.empty(size), persistent=False)

    def _scale(self) -> None:
        self.scaled.copy_(self.weight).mul_(self.root)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, norm.hypot_(self.floor)).mul_(self.scaled).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual stream in place and return the normalised stream."""
        return self.forward(residual.add_(x))

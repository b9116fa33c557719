"""Owns RMSNorm, alone and after the addition to the residual stream.

Read by models. It must not keep activations; sums are taken in float32 whatever the type of the model.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.kernels.compiled_for import kernels_for
from sglang.srt.layers.weights.parameter import LoadableParameter, Place


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The compiled kernel does it in one operation where it is there. Else sqrt(mean(x^2) + eps) is
    hypot(norm(x), sqrt(size * eps)) / sqrt(size), and sqrt(size) goes into the weight: four operations, where
    F.rms_norm takes twice as long on CPU.
    """

    floor: torch.Tensor
    scaled: torch.Tensor

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = LoadableParameter(
            torch.empty(size, dtype=dtype), [Place.full(f"{name}.weight", (size,))], on_filled=self._scale
        )
        self.eps = eps
        self.root = math.sqrt(size)
        self.register_buffer("floor", torch.tensor(math.sqrt(size * eps)), persistent=False)
        self.register_buffer("scaled", torch.empty(size), persistent=False)

    def _scale(self) -> None:
        self.scaled.copy_(self.weight).mul_(self.root)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = kernels_for(x)
        if kernels is not None and x.is_contiguous():
            rows = x.view(-1, x.shape[-1])
            kernels.rmsnorm(rows, self.weight, out := torch.empty_like(rows), self.eps)
            return out.view(x.shape)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, norm.hypot_(self.floor)).mul_(self.scaled).to(x.dtype)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Each head of x [rows, heads, size], rows apart; may work in place: use what is returned."""
        kernels = kernels_for(x)
        if kernels is None:
            return self.forward(x)
        heads: torch.Tensor = kernels.rmsnorm_heads(x, self.weight, self.eps)
        return heads

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual stream in place and return the normalised stream; x is used up."""
        kernels = kernels_for(x)
        if kernels is not None and x.dim() == 2 and residual.is_contiguous():
            x = x.contiguous()
            kernels.fused_add_rmsnorm(x, residual, self.weight, self.eps)
            return x
        return self.forward(residual.add_(x))

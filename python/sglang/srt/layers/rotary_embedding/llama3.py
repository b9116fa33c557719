"""Owns Llama 3's rotary frequencies: those of long waves are divided by a factor that fades to 1.

Built by `get_rope`. It must not read a config file: the parameters arrive checked.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.architectures.rope_scaling import Llama3Scaling, llama3_factors
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Plain frequencies divided by the factor of their wave length."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, scaling: Llama3Scaling) -> None:
        self._scaling = scaling
        super().__init__(head_dim, theta, dtype)

    def _frequencies(self) -> torch.Tensor:
        factors = llama3_factors(self._scaling, self.theta, self.head_dim)
        return super()._frequencies() / torch.tensor(factors)

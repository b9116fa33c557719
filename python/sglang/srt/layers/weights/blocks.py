"""Owns a part of a weight as whole numbers with scales, the way block formats of checkpoints hold it.

Made by loaders, read by the linear method that computes with it. It must not know a file format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Inputs that share a scale, or two of 16 each.
BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Rows of a weight: a value is `number * scale`, plus its minimum where there is one.

    numbers: int8 [rows, in]. scales: float32 [rows, in / 32], or [rows, in / 16]. minima: float32 [rows, in /
    32].
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    @property
    def scales_of_block(self) -> int:
        """Scales of a row in 32 inputs: 1 or 2."""
        return self.scales.shape[1] * BLOCK // self.numbers.shape[1]

    def dequantized(self) -> torch.Tensor:
        """float32 [rows, in]."""
        values = self.numbers.float() * self.scales.repeat_interleave(BLOCK // self.scales_of_block, dim=1)
        return values if self.minima is None else values + self.minima.repeat_interleave(BLOCK, dim=1)

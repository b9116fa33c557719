"""Owns weight items made of tensors in memory, for tests that fill layers without a file.

Read by layer and model tests. It must not convert anything but the type; it counts what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger


class Reads:
    """How many values of each tensor were read."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def item(self, name: str, tensor: torch.Tensor, file: str = "memory") -> WeightItem:
        """An item that reads from `tensor`."""

        def load(dtype: torch.dtype, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
            part = tensor.narrow(dim, start, tensor.shape[dim] - start if length is None else length)
            self.values[name] = self.values.get(name, 0) + part.numel()
            return part.to(dtype)

        return WeightItem(name, file, tuple(tensor.shape), load, tensor.nbytes)


def fill(parameters: Iterable[nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> Reads:
    """Fill parameters through the real ledger; returns what was read."""
    reads = Reads()
    WeightLedger(parameters).fill_all([reads.item(name, tensor) for name, tensor in tensors.items()])
    return reads

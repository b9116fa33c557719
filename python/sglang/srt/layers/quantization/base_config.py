"""Owns the seam between a linear layer and the stored form of its weight.

Read by `layers/linear.py` and the vocabulary layers, implemented by the files beside this one. Nobody but the
method may assume how a weight lies in memory: `weight` is row-major only until `pack` has run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.layers.weights.parameter import Place


class LinearMethod(ABC):
    """Life of a weight: `create_weights`, the loader fills it, `pack` once, then `apply` any number of times.

    `unpack` gives the row-major weight back at any time (checks and weight updates).
    """

    @abstractmethod
    def create_weights(
        self, layer: Any, shape: tuple[int, int], places: Sequence[Place], dtype: torch.dtype
    ) -> None:
        """Give the layer a `weight` of this rank's shape [out, in] that packs itself when it is filled."""

    @abstractmethod
    def pack(self, layer: Any) -> None:
        """Bring the filled weight into the stored form; the row-major one may be given up."""

    @abstractmethod
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] times the stored weight, plus bias: [rows, out] in the type of x."""

    @abstractmethod
    def unpack(self, layer: Any) -> torch.Tensor:
        """The weight as row-major [out, in]."""


class QuantizationConfig(ABC):
    """Chooses the linear method of each layer by the layer's checkpoint name."""

    @abstractmethod
    def linear_method(self, prefix: str) -> LinearMethod: ...

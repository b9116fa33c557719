"""Owns the seam between a linear layer and the stored form of its weight.

Read by `layers/linear.py` and the vocabulary layers, implemented by the files beside this one. Nobody but a
stored weight may assume how it lies in memory: `layer.weight` is row-major only until it is packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.layers.weights.parameter import LoadableParameter, Place


class StoredWeight(ABC):
    """A weight [out, in] in the form in which it is multiplied."""

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] times the weight, plus bias: [rows, out] in the type of x."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] times the weight: float32 [rows, out], rounded to a shorter type only if need be."""
        return self.apply(x, None).float()

    #: Whether `rows` gives rows of the weight: a tied table then needs no numbers of its own.
    has_rows = False

    def rows(self, ids: torch.Tensor, out: torch.Tensor, first_id: int, is_share: bool) -> torch.Tensor:
        """Row `id - first_id` of the weight for each id (int64 [rows]) into out [rows, in].

        Of a share of a longer table, ids of other shares give zeros.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no rows")

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """The weight as row-major [out, in], for checks and weight updates."""


class LinearLayer(Protocol):
    """What a method sets on a layer: `weight` at once, `stored` when the weight is filled."""

    weight: LoadableParameter
    stored: StoredWeight


class LinearMethod(ABC):
    """How a layer's weight is loaded and stored; the layer multiplies with `layer.stored.apply`."""

    #: Whether the numbers of a tied head are those of the embedding table.
    shares_table = False

    @abstractmethod
    def create_weights(
        self,
        layer: LinearLayer,
        shape: tuple[int, int],
        places: Sequence[Place],
        dtype: torch.dtype,
        *,
        is_table: bool = False,
    ) -> None:
        """Give the layer a `weight` of this rank's shape [out, in] that packs itself when it is filled.

        `is_table` (only where `shares_table`): rows are looked up in it as well, so what is row-major stays
        unless the stored form gives rows.
        """

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> StoredWeight:
        """The stored form of a filled row-major weight, which is left alone."""


class QuantizationConfig(ABC):
    """Chooses the linear method of each layer by the layer's checkpoint name."""

    @abstractmethod
    def linear_method(self, prefix: str) -> LinearMethod: ...

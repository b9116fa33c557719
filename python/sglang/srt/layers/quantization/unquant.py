"""Owns the linear method of unquantized weights.

Chosen by default for every linear layer and the head. How the numbers lie in memory is up to
`stored_forms.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.quantization.base_config import (
    LinearLayer,
    LinearMethod,
    QuantizationConfig,
    StoredWeight,
)
from sglang.srt.layers.quantization.stored_forms import RowMajorWeight, fastest_form
from sglang.srt.layers.weights.parameter import LoadableParameter, Place, without_memory


class UnquantizedLinearMethod(LinearMethod):
    """`layer.weight` is filled, then packed into `layer.stored` and emptied unless that form shares it."""

    shares_table = True

    def create_weights(
        self,
        layer: LinearLayer,
        shape: tuple[int, int],
        places: Sequence[Place],
        dtype: torch.dtype,
        *,
        is_table: bool = False,
    ) -> None:
        layer.weight = LoadableParameter(
            without_memory(shape, dtype), places, on_filled=lambda: self._store(layer, is_table)
        )

    def pack(self, weight: torch.Tensor) -> StoredWeight:
        return fastest_form(weight.dtype, weight.device)(weight)

    def _store(self, layer: LinearLayer, is_table: bool) -> None:
        weight = layer.weight.data
        layer.stored = self.pack(weight)
        looked_up = is_table and not layer.stored.has_rows
        if not looked_up and not isinstance(layer.stored, RowMajorWeight):
            layer.weight.data = weight.new_empty(0)


class UnquantizedConfig(QuantizationConfig):
    """Every layer unquantized."""

    def linear_method(self, prefix: str) -> UnquantizedLinearMethod:
        return UnquantizedLinearMethod()

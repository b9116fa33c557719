"""Owns unquantized weights: which stored form suits the device and the type, and its multiplication.

Chosen by default for every linear layer and the head. It must not change values: every form multiplies the
numbers of the checkpoint in the model's type, with at least the precision of that type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from sglang.srt.layers.parameter import LoadableParameter, Place
from sglang.srt.layers.quantization.base_config import LinearMethod, QuantizationConfig
from sglang.srt.platforms import cpu_flags, cpu_has_bf16


class StoredForm(ABC):
    """One way to hold a weight. `state` is what `pack` returned; only the form looks into it."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    @abstractmethod
    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class RowMajorForm(StoredForm):
    """As the checkpoint has it, [out, in]."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, state, bias)

    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return state


class WidenedForm(StoredForm):
    """16-bit numbers held as float32, for processors that cannot multiply the 16-bit type.

    There the 16-bit product is emulated and takes 2 to 7 times as long as the float32 one; the price is twice
    the memory. The sum is float32 in both cases, so the result is the same up to the order of summation.
    """

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.linear(x.float(), state).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return state.to(dtype)


def has_native_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies this type in hardware."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return cpu_has_bf16()
    return bool(cpu_flags() & {"avx512_fp16", "amx_fp16", "asimdhp"})


def stored_form(dtype: torch.dtype, device: torch.device) -> StoredForm:
    """The form that is fastest for weights of this type on this device."""
    return RowMajorForm() if has_native_product(dtype, device) else WidenedForm()


class UnquantizedLinearMethod(LinearMethod):
    """`layer.weight` is filled, then replaced by `layer.stored` (the same tensor for the row-major form)."""

    def create_weights(
        self, layer: Any, shape: tuple[int, int], places: Sequence[Place], dtype: torch.dtype
    ) -> None:
        layer.weight = LoadableParameter(
            torch.empty(shape, dtype=dtype), places, on_filled=lambda: self.pack(layer)
        )
        layer.stored = None

    def pack(self, layer: Any) -> None:
        weight = layer.weight.data
        self.pack_shared(layer, weight)
        if layer.stored is not weight:
            layer.weight.data = torch.empty(0, dtype=layer.weight.dtype, device=layer.stored.device)

    def pack_shared(self, layer: Any, weight: torch.Tensor) -> None:
        """Pack a weight that lives elsewhere (a tied head) and is left alone."""
        layer.form = stored_form(weight.dtype, weight.device)
        layer.weight_dtype = weight.dtype
        layer.stored = layer.form.pack(weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return layer.form.apply(layer.stored, x, bias)

    def unpack(self, layer: Any) -> torch.Tensor:
        return layer.form.unpack(layer.stored, layer.weight_dtype)


class UnquantizedConfig(QuantizationConfig):
    """Every layer unquantized."""

    def linear_method(self, prefix: str) -> UnquantizedLinearMethod:
        return UnquantizedLinearMethod()

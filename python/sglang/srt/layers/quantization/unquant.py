"""Owns unquantized weights: which stored form suits the device and the type, and its multiplication.

Chosen by default for every linear layer and the head. It must not change values: every form multiplies the
numbers of the checkpoint in the model's type, with at least the precision of that type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang.srt.layers.parameter import LoadableParameter, Place
from sglang.srt.layers.quantization.base_config import LinearMethod, QuantizationConfig
from sglang.srt.platforms import cpu_flags, cpu_has_bf16

#: Rows of input that the packed layout is asked to suit; measured best or equal from 2 to 256 rows.
_PACKED_ROWS = 32
#: A packed weight up to this size keeps a second, transposed form for single rows (see `PackedForm`).
_SECOND_FORM_BYTES = 32 << 20


class StoredForm(ABC):
    """One way to hold a weight. `state` is what `pack` returned; only the form looks into it."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> Any: ...

    @abstractmethod
    def apply(self, state: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    @abstractmethod
    def unpack(self, state: Any, dtype: torch.dtype) -> torch.Tensor: ...


class RowMajorForm(StoredForm):
    """As the checkpoint has it, [out, in]."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, state, bias)

    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return state


@dataclass(slots=True)
class _Packed:
    blocks: torch.Tensor  # oneDNN's own layout of [out, in]
    transposed: torch.Tensor | None  # [in, out]


class PackedForm(StoredForm):
    """float32 in oneDNN's blocked layout, for CPUs; 16-bit numbers are widened where the processor cannot
    multiply them.

    Against row-major float32, one thread, all weights of SmolLM2: 1.9 times as fast for 2 rows, 1.5 for 4 to
    8, 1.3 for 16, equal from 64 on. For one row the product over [in, out] reads memory 1.4 times as fast as
    either, so small weights keep that form too. An emulated 16-bit product takes 2 to 7 times as long as the
    float32 one. Sums are float32 in every case; only their order differs.
    """

    def pack(self, weight: torch.Tensor) -> _Packed:
        weight = weight.float()
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        small = weight.nbytes <= _SECOND_FORM_BYTES
        return _Packed(blocks, weight.t().contiguous() if small else None)

    def apply(self, state: _Packed, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if x.shape[0] == 1 and state.transposed is not None:
            out = torch.mm(wide, state.transposed)
        else:
            out = torch.ops.mkldnn._linear_pointwise(wide, state.blocks, None, "none", [], "")
        out = out.to(x.dtype)
        return out if bias is None else out.add_(bias)

    def unpack(self, state: _Packed, dtype: torch.dtype) -> torch.Tensor:
        return state.blocks.to_dense().to(dtype)


def has_native_product(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies the 16-bit type in hardware."""
    if dtype == torch.bfloat16:
        return cpu_has_bf16()
    return bool(cpu_flags() & {"avx512_fp16", "amx_fp16", "asimdhp"})


def stored_form(dtype: torch.dtype, device: torch.device) -> StoredForm:
    """The form that is fastest for weights of this type on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return RowMajorForm()
    if dtype == torch.float32 or not has_native_product(dtype):
        return PackedForm()
    return RowMajorForm()


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
            layer.weight.data = weight.new_empty(0)

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

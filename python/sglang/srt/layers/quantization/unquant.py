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

from sglang.srt.layers.quantization.base_config import LinearMethod, QuantizationConfig
from sglang.srt.layers.weights.parameter import LoadableParameter, Place
from sglang.srt.platforms import cpu_flags, cpu_has_bf16

#: Rows of input that the packed layout is asked to suit; measured best or equal from 2 to 256 rows.
_PACKED_ROWS = 32
#: A packed weight keeps a second form for single rows if that one takes at most this much.
_SINGLE_ROW_BYTES = 64 << 20
#: Outputs of one bag (see `BagForm`): their sums fit in registers.
_BAG = 64


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


class TransposedForm(StoredForm):
    """[in, out]: for a single row of float32 one thread reads it 1.3 times as fast as [out, in]."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t().contiguous()

    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(x, state) if bias is None else torch.addmm(bias, x, state)

    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return state.t().contiguous()


class SplitRowsForm(StoredForm):
    """[threads, out / threads, in], a view: for a single row of float32 each thread reads its own part.

    The plain product of one row hardly uses a second thread; this one reads 1.4 times as fast with two.
    """

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        threads = torch.get_num_threads()
        return weight.view(threads, weight.shape[0] // threads, weight.shape[1])

    def apply(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.expand(state.shape[0], 1, state.shape[2])
        out = torch.bmm(rows, state.transpose(1, 2)).view(1, -1)
        return out if bias is None else out.add_(bias)

    def unpack(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return state.reshape(-1, state.shape[2])


@dataclass(slots=True)
class _Bags:
    table: torch.Tensor  # [out / _BAG * in, _BAG]
    indices: torch.Tensor
    offsets: torch.Tensor


class BagForm(StoredForm):
    """A single row times 16-bit numbers, without a 16-bit product: y = sum of x[i] * weight[:, i] is a
    weighted embedding bag over the inputs, and that kernel (FBGEMM) widens on the way and sums in float32.

    1.7 times as fast as the emulated product, and half the bytes of a widened weight. The outputs are cut
    into bags of 64, each of whose rows lie together.
    """

    def pack(self, weight: torch.Tensor) -> _Bags:
        out, inner = weight.shape
        bags = out // _BAG
        return _Bags(
            weight.view(bags, _BAG, inner).transpose(1, 2).reshape(bags * inner, _BAG),
            torch.arange(bags * inner, device=weight.device),
            torch.arange(bags, device=weight.device) * inner,
        )

    def apply(self, state: _Bags, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weights = x.expand(len(state.offsets), -1).reshape(-1)
        out, *_ = torch._embedding_bag_forward_only(
            state.table, state.indices, state.offsets, False, 0, False, weights
        )
        out = out.view(1, -1)
        return out if bias is None else out.add_(bias)

    def unpack(self, state: _Bags, dtype: torch.dtype) -> torch.Tensor:
        bags = len(state.offsets)
        return state.table.view(bags, -1, _BAG).transpose(1, 2).reshape(bags * _BAG, -1)


@dataclass(slots=True)
class _Packed:
    blocks: torch.Tensor  # oneDNN's own layout of [out, in], float32
    single: StoredForm | None  # the form for one row, and what it packed
    single_state: Any


class PackedForm(StoredForm):
    """float32 in oneDNN's blocked layout, for CPUs; 16-bit numbers are widened where the processor cannot
    multiply them. A weight that is not too large keeps a second form for single rows.

    Against row-major float32, one thread, all weights of SmolLM2: 1.9 times as fast for 2 rows, 1.5 for 4 to
    8, 1.3 for 16, equal from 64 on, and for one. An emulated 16-bit product takes 2 to 7 times as long as the
    float32 one. Sums are float32 in every case; only their order differs.
    """

    def pack(self, weight: torch.Tensor) -> _Packed:
        single = self._single_row_form(weight)
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.float(), _PACKED_ROWS)
        return _Packed(blocks, single, None if single is None else single.pack(weight))

    @staticmethod
    def _single_row_form(weight: torch.Tensor) -> StoredForm | None:
        if weight.nbytes > _SINGLE_ROW_BYTES:
            return None
        if weight.dtype == torch.float32:
            threads = torch.get_num_threads()
            return SplitRowsForm() if threads > 1 and weight.shape[0] % threads == 0 else TransposedForm()
        has_kernel = "fbgemm" in torch.backends.quantized.supported_engines
        return BagForm() if has_kernel and weight.shape[0] % _BAG == 0 else None

    def apply(self, state: _Packed, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] == 1 and state.single is not None:
            return state.single.apply(state.single_state, x, bias)
        out = torch.ops.mkldnn._linear_pointwise(x.float(), state.blocks, None, "none", [], "").to(x.dtype)
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

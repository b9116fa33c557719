"""Owns the linear method of int8 weights with int8 inputs: `--quantization w8a8_int8`.

Weights of any checkpoint are quantized while they are read, in parts of a tensor: to -127 .. 127, with one
scale an output; those of a checkpoint that stores them so are taken as they are. Each row of x is quantized
when it is multiplied. Without the compiled kernels torch computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.kernels.linear_int8 import MOST_INPUTS, linear_int8
from sglang.srt.layers.quantization.base_config import (
    LinearLayer,
    LinearMethod,
    QuantizationConfig,
    StoredWeight,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.weights.parameter import LoadableParameter, Place, WeightItem, without_memory

#: Values of a tensor that are read and quantized at once.
_CHUNK_VALUES = 4 << 20
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def quantized_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight float32 [out, in] as int8 numbers, -127 .. 127, and float32 scales [out]: largest size / 127."""
    scales = weight.abs().amax(dim=1) / 127.0
    numbers = weight / scales.where(scales > 0, 1.0)[:, None]
    return numbers.round().clamp(-127, 127).to(torch.int8), scales


class Int8Weight(StoredWeight):
    """Numbers [out, in] and scales [out] as they are, multiplied by torch: exact, and slow."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_int8(x, self.numbers, self.scales, bias)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.numbers, self.scales, None, torch.float32)

    def unpack(self) -> torch.Tensor:
        return self.numbers * self.scales[:, None]


class Int8PanelWeight(StoredWeight):
    """Panels of 32 outputs with their scales, multiplied by the compiled kernels."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        kernels = compiled_kernels()
        assert kernels is not None  # whoever chose this form has asked
        self.kernels = kernels.linear_int8
        self.outputs, self.inputs = numbers.shape
        self.panels: torch.Tensor = self.kernels.pack_int8(numbers, scales)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs)
        self.kernels.linear_int8(x, self.panels, bias, out)
        return out

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs, dtype=torch.float32)
        self.kernels.linear_int8(x, self.panels, None, out)
        return out

    def unpack(self) -> torch.Tensor:
        numbers, scales = self.kernels.unpack_int8(self.panels, self.outputs, self.inputs)
        weight: torch.Tensor = numbers * scales[:, None]
        return weight


def has_int8_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernels multiply int8 weights with x of this type."""
    return device.type == "cpu" and dtype in _KERNEL_DTYPES and compiled_kernels() is not None


class Int8Parameter(LoadableParameter):
    """Quantizes parts of its weight as it reads them; its own data is never written, so it takes no memory.

    An output has one scale over all of its inputs, also where this rank holds only some of them: so every
    layout has the same numbers. The price is that each rank reads such a tensor whole.
    """

    numbers: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # float32 [out]

    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        places: Sequence[Place],
        on_filled: Callable[[], None],
    ) -> Int8Parameter:
        assert len(places) == 1 or all(place.dim == 0 for place in places)  # an output has one scale
        parameter = super().__new__(cls, without_memory(shape, dtype), places, on_filled)
        assert isinstance(parameter, Int8Parameter)
        parameter.clear()
        return parameter

    def clear(self) -> None:
        self.numbers, self.scales = torch.empty(0, dtype=torch.int8), torch.empty(0)

    def part_read(self, place: Place) -> tuple[int, int, int]:
        if place.dim == 0 or place.share.length == 0:
            return super().part_read(place)
        return 0, 0, place.source_shape[0]

    def read_part(self, place: Place, item: WeightItem) -> bool:
        if not self.scales.numel():
            self.numbers = torch.zeros(self.shape, dtype=torch.int8, device=self.device)
            self.scales = torch.zeros(self.shape[0], device=self.device)
        _, first, length = self.part_read(place)
        if length == 0:
            return True
        to, columns = (place.start, slice(None)) if place.dim == 0 else (0, _columns(place))
        step = max(1, _CHUNK_VALUES // max(item.shape[1], 1))
        for begin in range(0, length, step):
            count = min(step, length - begin)
            numbers, scales = _read(item, first + begin, count)
            if not bool(scales.isfinite().all()):
                row = first + begin + int((~scales.isfinite()).nonzero()[0])
                raise ValueError(
                    f"tensor {item.name} in {item.file}: row {row} holds a number that is not finite, and "
                    "int8 has none for it; leave --quantization w8a8_int8 out, or fetch the checkpoint again"
                )
            rows = slice(to + begin, to + begin + count)
            numbers = numbers[:, columns]
            self.numbers[rows, : numbers.shape[1]] = numbers
            self.scales[rows] = scales
        return True


def _read(item: WeightItem, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some outputs of a tensor, all of their inputs: as the file has them, or quantized."""
    if item.load_int8 is not None:
        return item.load_int8(first, count)
    return quantized_channels(item.load(torch.float32, 0, first, count))


def _columns(place: Place) -> slice:
    return slice(place.share.start, place.share.start + place.share.length)


class W8A8Int8LinearMethod(LinearMethod):
    """Each weight quantized as it is read, and packed when its last part is there."""

    def create_weights(
        self,
        layer: LinearLayer,
        shape: tuple[int, int],
        places: Sequence[Place],
        dtype: torch.dtype,
        *,
        is_table: bool = False,
    ) -> None:
        if shape[1] > MOST_INPUTS:
            raise ValueError(
                f"{places[0].name} has {shape[1]} inputs, and --quantization w8a8_int8 adds up "
                f"{MOST_INPUTS} at most; leave it out"
            )
        layer.weight = Int8Parameter(shape, dtype, places, on_filled=lambda: self._store(layer))

    def pack(self, weight: torch.Tensor) -> StoredWeight:
        return _stored(*quantized_channels(weight.float()), weight.dtype)

    def _store(self, layer: LinearLayer) -> None:
        parameter = layer.weight
        assert isinstance(parameter, Int8Parameter)
        layer.stored = _stored(parameter.numbers, parameter.scales, parameter.dtype)
        parameter.clear()
        parameter.data = parameter.new_empty(0)


def _stored(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> StoredWeight:
    form = Int8PanelWeight if has_int8_kernel(dtype, numbers.device) else Int8Weight
    return form(numbers, scales)


class W8A8Int8Config(QuantizationConfig):
    """Every linear layer in int8, and the head unless told otherwise; embedding and norms are not."""

    def __init__(self, *, with_head: bool = True) -> None:
        self.with_head = with_head

    def linear_method(self, prefix: str) -> LinearMethod:
        if prefix == "lm_head" and not self.with_head:
            return UnquantizedLinearMethod()
        return W8A8Int8LinearMethod()

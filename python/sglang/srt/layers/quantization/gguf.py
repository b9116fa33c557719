"""Owns the linear method of GGUF files whose blocks are computed as they are.

Chosen for a GGUF file with `--dtype auto`, or by `--quantization gguf`, where the compiled kernels are. Each
layer packs the blocks of its parts; x is quantized to 8 bits on the way, as the format means it. A layer with
a part that is no such block (a float type, Q6_K, a share that cuts a block) is dequantized and stored as an
unquantized one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.quantization.base_config import (
    LinearLayer,
    LinearMethod,
    QuantizationConfig,
    StoredWeight,
)
from sglang.srt.layers.quantization.stored_forms import fastest_form
from sglang.srt.layers.weights.blocks import BLOCK, BlockPart
from sglang.srt.layers.weights.parameter import LoadableParameter, Place, WeightItem, without_memory

logger = logging.getLogger(__name__)


class BlockStoredWeight(StoredWeight):
    """Records of 32 inputs of 16 outputs, multiplied by the compiled kernels.

    Scales are half floats: of the K formats the product of two is rounded to one.
    """

    def __init__(self, weight: BlockPart) -> None:
        kernels = compiled_kernels()
        assert kernels is not None  # whoever chose this form has asked
        self.kernels, self.embedding = kernels.linear, kernels.embedding
        self.outputs = weight.numbers.shape[0]
        self.form = self.kernels.BlockForm[_smallest_form(weight)]
        minima = None if weight.minima is None else weight.minima.half()
        halves = self.kernels.BlockWeight(self.form, weight.numbers, weight.scales.half(), minima)
        self.packed: torch.Tensor = self.kernels.pack_blocks(halves)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs)
        self.kernels.linear_blocks(x, self.packed, bias, out, self.form)
        return out

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs, dtype=torch.float32)
        self.kernels.linear_blocks(x, self.packed, None, out, self.form)
        return out

    has_rows = True

    def rows(self, ids: torch.Tensor, out: torch.Tensor, first_id: int, is_share: bool) -> torch.Tensor:
        rows: torch.Tensor = self.embedding.embed_blocks(
            ids, self.packed, out, self.form, self.outputs, first_id, is_share
        )
        return rows

    def unpack(self) -> torch.Tensor:
        weight: torch.Tensor = self.kernels.unpack_blocks(self.packed, self.form, self.outputs).dequantized()
        return weight


def _smallest_form(weight: BlockPart) -> str:
    """4 bits where all numbers fit; numbers with a minimum are unsigned, those without are signed."""
    lowest, highest = (int(end) for end in weight.numbers.aminmax())
    if weight.minima is None:
        return "Q4" if lowest >= -8 and highest <= 7 else "Q8"
    return "Q4_MIN" if lowest >= 0 and highest <= 15 else "Q8_MIN"


class BlockParameter(LoadableParameter):
    """Takes the parts of its weight as blocks; its own data is never written, so it takes no memory."""

    parts: dict[str, BlockPart | torch.Tensor | None]
    has_blocks: bool  # whether the file has blocks for some part

    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        places: Sequence[Place],
        on_filled: Callable[[], None],
    ) -> BlockParameter:
        parameter = super().__new__(cls, without_memory(shape, dtype), places, on_filled)
        assert isinstance(parameter, BlockParameter)
        parameter.parts, parameter.has_blocks = {}, False
        return parameter

    def read_part(self, place: Place, item: WeightItem) -> bool:
        self.has_blocks |= item.block > 1
        share, last = place.share, place.dim == 1
        is_cut = last and (share.start % BLOCK or share.length % BLOCK or share.room % BLOCK)
        if share.length == 0:
            self.parts[place.name] = None
        elif item.load_blocks is None or is_cut or item.shape[1] % BLOCK:
            self.parts[place.name] = item.load(self.dtype, place.dim, share.start, share.length)
        else:
            self.parts[place.name] = item.load_blocks(place.dim, share.start, share.length)
        return True

    def whole(self) -> BlockPart | torch.Tensor:
        """All parts as blocks, or as a matrix of the model's type where some part is none."""
        if all(isinstance(part, BlockPart | None) for part in self.parts.values()):
            return self._whole_blocks()
        weight = torch.zeros(self.shape, dtype=self.dtype)
        for place in self.places:
            part = self.parts[place.name]
            place.fill(weight, part.dequantized().to(self.dtype) if isinstance(part, BlockPart) else part)
        return weight

    def _whole_blocks(self) -> BlockPart:
        outputs, inputs = self.shape
        numbers = torch.zeros(outputs, inputs, dtype=torch.int8)
        scales, minima = torch.zeros(2, outputs, inputs // BLOCK)
        has_minima = False
        for place in self.places:
            part = self.parts[place.name]
            if not isinstance(part, BlockPart):
                continue
            rows, columns = part.numbers.shape
            first = place.start if place.dim == 0 else 0
            numbers[first : first + rows, :columns] = part.numbers
            scales[first : first + rows, : columns // BLOCK] = part.scales
            if part.minima is not None:
                minima[first : first + rows, : columns // BLOCK] = part.minima
                has_minima = True
        return BlockPart(numbers, scales, minima if has_minima else None)


class GGUFLinearMethod(LinearMethod):
    """The weight of a layer from the blocks of the file."""

    shares_table = True  # every form that it stores gives rows

    def create_weights(
        self,
        layer: LinearLayer,
        shape: tuple[int, int],
        places: Sequence[Place],
        dtype: torch.dtype,
        *,
        is_table: bool = False,
    ) -> None:
        layer.weight = BlockParameter(shape, dtype, places, on_filled=lambda: self._store(layer))

    def pack(self, weight: torch.Tensor) -> StoredWeight:
        return fastest_form(weight.dtype, weight.device)(weight)

    def _store(self, layer: LinearLayer) -> None:
        parameter = layer.weight
        assert isinstance(parameter, BlockParameter)
        whole = parameter.whole()
        parameter.parts.clear()
        parameter.data = parameter.new_empty(0)
        if isinstance(whole, BlockPart):
            layer.stored = BlockStoredWeight(whole)
            return
        if parameter.has_blocks:
            names = ", ".join(place.name for place in parameter.places)
            logger.info("%s: not computed as blocks, because a part is stored or cut otherwise", names)
        layer.stored = self.pack(whole)


class GGUFConfig(QuantizationConfig):
    """Every linear layer and the head from the blocks of the file."""

    def linear_method(self, prefix: str) -> GGUFLinearMethod:
        return GGUFLinearMethod()

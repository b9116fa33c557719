"""Owns the linear method of GGUF files whose blocks are computed as they are.

Chosen for a GGUF file with `--dtype auto`, or by `--quantization gguf`, where the compiled kernels are. Each
layer packs the blocks of its parts; x is quantized to 8 bits on the way, as the format means it. A layer with
a part that is no such block (a float type, a share that cuts a block) is dequantized and stored as an
unquantized one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some outputs in one form (a `BlockForm`): `numbers` is what `pack_blocks` made of them."""

    form: Any
    outputs: int
    numbers: torch.Tensor


class BlockStoredWeight(StoredWeight):
    """Records of 32 inputs of 16 outputs, multiplied by the compiled kernels; parts of one form are one.

    Scales are half floats: of the K formats the product of two is rounded to one.
    """

    def __init__(self, parts: Sequence[BlockPart]) -> None:
        kernels = compiled_kernels()
        assert kernels is not None  # whoever chose this form has asked
        self.kernels, self.embedding = kernels.linear, kernels.embedding
        self.outputs = sum(len(part.numbers) for part in parts)
        self.packed = [self._pack(part) for part in parts]

    def _pack(self, part: BlockPart) -> PackedPart:
        form = self.kernels.BlockForm[smallest_form(part)]
        minima = None if part.minima is None else part.minima.half()
        weight = self.kernels.BlockWeight(form, part.numbers, part.scales.half(), minima)
        return PackedPart(form, len(part.numbers), self.kernels.pack_blocks(weight))

    @property
    def forms(self) -> list[str]:
        """The names of the parts' forms, in the order of the outputs."""
        return [part.form.name for part in self.packed]

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x, bias, x.new_empty(x.shape[0], self.outputs))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, None, x.new_empty(x.shape[0], self.outputs, dtype=torch.float32))

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        if len(self.packed) == 1:
            self.kernels.linear_blocks(x, self.packed[0].numbers, bias, out, self.packed[0].form)
            return out
        first = 0
        for part in self.packed:
            end = first + part.outputs
            some = None if bias is None else bias[first:end]
            self.kernels.linear_blocks(x, part.numbers, some, out[:, first:end], part.form)
            first = end
        return out

    has_rows = True

    def rows(self, ids: torch.Tensor, out: torch.Tensor, first_id: int, is_share: bool) -> torch.Tensor:
        (part,) = self.packed  # a table is one tensor
        rows: torch.Tensor = self.embedding.embed_blocks(
            ids, part.numbers, out, part.form, part.outputs, first_id, is_share
        )
        return rows

    def unpack(self) -> torch.Tensor:
        return torch.cat(
            [
                self.kernels.unpack_blocks(part.numbers, part.form, part.outputs).dequantized()
                for part in self.packed
            ]
        )


def smallest_form(weight: BlockPart) -> str:
    """The fewest bits that hold all numbers; those with a minimum are unsigned, the others signed."""
    if weight.scales_of_block == 2:
        return "Q6"
    lowest, highest = (int(end) for end in weight.numbers.aminmax())
    if weight.minima is not None:
        return "Q4_MIN" if highest <= 15 else "Q5_MIN"
    bits = next(bits for bits in (4, 5, 8) if -(1 << bits) <= 2 * lowest and 2 * highest < 1 << bits)
    return f"Q{bits}"


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

    def whole(self) -> list[BlockPart] | torch.Tensor:
        """All parts as blocks, or as a matrix of the model's type where some part is none."""
        if all(isinstance(part, BlockPart | None) for part in self.parts.values()):
            return [self._joined(places) for places in self._places_of_one_form()]
        weight = torch.zeros(self.shape, dtype=self.dtype)
        for place in self.places:
            part = self.parts[place.name]
            place.fill(weight, part.dequantized().to(self.dtype) if isinstance(part, BlockPart) else part)
        return weight

    def _places_of_one_form(self) -> list[list[Place]]:
        """Neighbours with the same form together; what holds nothing goes with any."""
        found: list[list[Place]] = []
        last: str | None = None
        for place in self.places:
            part = self.parts[place.name]
            form = smallest_form(part) if isinstance(part, BlockPart) else None
            if found and (form is None or last in (form, None)):
                found[-1].append(place)
            else:
                found.append([place])
            last = form or last
        return found

    def _joined(self, places: Sequence[Place]) -> BlockPart:
        """The parts of some places, with zeros where a place has room for more."""
        parts = [part for place in places if isinstance(part := self.parts[place.name], BlockPart)]
        inputs = self.shape[1]
        outputs = sum(place.share.room for place in places) if places[0].dim == 0 else self.shape[0]
        scales_of_block = parts[0].scales_of_block if parts else 1
        numbers = torch.zeros(outputs, inputs, dtype=torch.int8)
        scales = torch.zeros(outputs, inputs * scales_of_block // BLOCK)
        has_minima = bool(parts) and parts[0].minima is not None
        minima = torch.zeros(outputs, inputs // BLOCK) if has_minima else None
        for place in places:
            part = self.parts[place.name]
            if not isinstance(part, BlockPart):
                continue
            first = place.start - places[0].start if place.dim == 0 else 0
            for whole, some in ((numbers, part.numbers), (scales, part.scales), (minima, part.minima)):
                if whole is not None and some is not None:
                    whole[first : first + some.shape[0], : some.shape[1]] = some
        return BlockPart(numbers, scales, minima)


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
        if isinstance(whole, list):
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

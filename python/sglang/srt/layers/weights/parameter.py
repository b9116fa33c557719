"""Owns how checkpoint tensors reach parameters: places that know their shard, a ledger that counts them.

Read by layers (which declare places), models (which open a ledger over themselves) and loaders (which yield
`WeightItem`). It must not know file formats or model names; widths and ranks arrive as plain numbers from the
layer that asked the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sglang.srt.layers.weights.blocks import BlockPart
from sglang.srt.layers.weights.head_share import AxisShare


class LoadPart(Protocol):
    """Reads and converts `length` places of dimension `dim` from `start` on; by default the whole tensor."""

    def __call__(
        self, dtype: torch.dtype, /, dim: int = 0, start: int = 0, length: int | None = None
    ) -> torch.Tensor: ...


class LoadBlocks(Protocol):
    """Reads the same part as whole numbers with scales; of the last dimension, multiples of a block only."""

    def __call__(self, dim: int, start: int, length: int, /) -> BlockPart: ...


class LoadInt8(Protocol):
    """Reads `length` outputs from `start` on as int8 numbers [length, in] and float32 scales [length]."""

    def __call__(self, start: int, length: int, /) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class WeightItem:
    """One tensor of a checkpoint, not read yet.

    `name` is the Hugging Face name whatever the file format is, `file` is what an error names, and
    `load(dtype, dim, start, length)` reads only that part. `nbytes` is the size of the whole tensor in the
    file; `block` values of the last dimension are packed together and can only be read together.
    `load_blocks` is there where the file holds whole numbers with a scale for 32 or 16 of them each,
    `load_int8` where it holds them with a scale an output.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    load: LoadPart
    nbytes: int
    block: int = 1
    load_blocks: LoadBlocks | None = None
    load_int8: LoadInt8 | None = None

    def part_nbytes(self, dim: int, start: int, length: int) -> int:
        """Bytes of the file that reading a part takes: whole blocks."""
        if length == 0:
            return 0
        if dim == len(self.shape) - 1:
            first, last = start // self.block, -(-(start + length) // self.block)
            length = (last - first) * self.block
        return self.nbytes * length // self.shape[dim]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor lies in a parameter.

    Rows `start : start + share.room` of the parameter's dimension `dim` belong to it; the first
    `share.length` of them hold the tensor's rows from `share.start` on, the rest are zeros. `source_shape` is
    the shape of the whole tensor in the file.
    """

    name: str
    source_shape: tuple[int, ...]
    dim: int
    start: int
    share: AxisShare

    @classmethod
    def full(cls, name: str, shape: tuple[int, ...]) -> Place:
        """Every rank holds the whole tensor."""
        return cls(name, shape, 0, 0, AxisShare.whole(shape[0]))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what this rank reads."""
        return (*self.source_shape[: self.dim], self.share.length, *self.source_shape[self.dim + 1 :])

    @property
    def is_whole(self) -> bool:
        return self.share.length == self.source_shape[self.dim]

    def fill(self, parameter: torch.Tensor, part: torch.Tensor | None) -> None:
        """Copy what this rank read to its rows of `parameter`, and zeros to the padding behind it."""
        share = self.share
        if part is not None:
            parameter.narrow(self.dim, self.start, share.length).copy_(part)
        if share.padding:
            parameter.narrow(self.dim, self.start + share.length, share.padding).zero_()


def bytes_to_read(parameters: Iterable[nn.Parameter], items: Iterable[WeightItem]) -> dict[str, int]:
    """Bytes of each item that this rank reads to fill these parameters; a part used twice is read once."""
    parts: dict[str, set[tuple[int, int, int]]] = {}
    for parameter in parameters:
        if not isinstance(parameter, LoadableParameter):
            continue
        for place in parameter.places:
            parts.setdefault(place.name, set()).add(parameter.part_read(place))
    return {item.name: sum(item.part_nbytes(*part) for part in parts.get(item.name, ())) for item in items}


def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape that holds one number, for a parameter whose data is written late, or never.

    Memory taken for all layers at once, and given back layer by layer, would stay with the process: nothing
    that comes later fits into the gaps.
    """
    return torch.empty(1, dtype=dtype).expand(shape)


class LoadableParameter(nn.Parameter):
    """A parameter that lists the places of all checkpoint tensors it is made of.

    `on_filled` runs once, when the last place is filled: that is where a linear layer packs its weight. Data
    made `without_memory` gets it when the first place is filled, so that the plain and the packed form of the
    whole model never exist at the same time.
    """

    places: tuple[Place, ...]
    on_filled: Callable[[], None] | None

    def __new__(
        cls, data: torch.Tensor, places: Iterable[Place], on_filled: Callable[[], None] | None = None
    ) -> LoadableParameter:
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.places = tuple(places)
        parameter.on_filled = on_filled
        _assert_places_tile(parameter)
        return parameter

    def make_room(self) -> None:
        """Take memory for all places, where it was made `without_memory`."""
        if self.untyped_storage().nbytes() < self.nbytes:
            self.data = torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def part_read(self, place: Place) -> tuple[int, int, int]:
        """(dimension, start, length) of the tensor that is read for a place."""
        return place.dim, place.share.start, place.share.length

    def read_part(self, place: Place, item: WeightItem) -> bool:
        """Read the place's part of an item; False: the ledger reads it, and copies it in."""
        return False


def _assert_places_tile(parameter: LoadableParameter) -> None:
    """The places of a parameter follow one another and leave no row out."""
    position = 0
    for place in parameter.places:
        shape = list(place.source_shape)
        shape[place.dim] = parameter.shape[place.dim]
        assert list(parameter.shape) == shape, (
            f"{place.name}: {tuple(parameter.shape)} cannot hold {place.source_shape}"
        )
        assert place.share.end <= place.source_shape[place.dim] and place.share.padding >= 0, (
            f"{place.name}: {place.share} does not lie in {place.source_shape}"
        )
        assert place.start == position, f"{place.name} starts at {place.start}, expected {position}"
        position += place.share.room
    dim = parameter.places[0].dim
    assert position == parameter.shape[dim], (
        f"{parameter.places[-1].name} ends at {position} of {parameter.shape[dim]}"
    )


class WeightLedger:
    """Fills each place of a model exactly once, from a tensor of exactly its shape.

    A tensor may fill several parameters (a tied table and a head that is cut differently); each reads its own
    part. A `ValueError` names the tensor, the file and both shapes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._uses: dict[str, list[tuple[LoadableParameter, Place]]] = {}
        self._open: dict[int, int] = {}  # id of a parameter -> places not filled yet
        self._filled: dict[str, str] = {}  # tensor -> file that filled it
        for parameter in parameters:
            if not isinstance(parameter, LoadableParameter):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} does not say how it is loaded; "
                    "create it as a LoadableParameter"
                )
            self._open[id(parameter)] = len(parameter.places)
            for place in parameter.places:
                uses = self._uses.setdefault(place.name, [])
                assert all(other is not parameter for other, _ in uses), f"{place.name} has two places"
                assert all(other.source_shape == place.source_shape for _, other in uses), (
                    f"{place.name} is used in two shapes"
                )
                uses.append((parameter, place))

    def fill_all(self, items: Iterable[WeightItem]) -> None:
        """Fill from every item, then check that nothing is missing."""
        with torch.no_grad():
            for item in items:
                self.fill(item)
        self.assert_complete()

    def fill(self, item: WeightItem) -> None:
        """Check the item's name and shape, then read what each of its places needs."""
        if item.name not in self._uses:
            raise ValueError(
                f"tensor {item.name} in {item.file}, shape {item.shape}: the model has no place "
                "for it; the checkpoint does not belong to this architecture or configuration"
            )
        if item.name in self._filled:
            raise ValueError(
                f"tensor {item.name} in {item.file}, shape {item.shape}: it was already loaded from "
                f"{self._filled[item.name]}; a checkpoint must hold each tensor once"
            )
        uses = self._uses[item.name]
        expected = uses[0][1].source_shape
        if item.shape != expected:
            raise ValueError(
                f"tensor {item.name} in {item.file} has shape {item.shape}, the model needs {expected}; "
                "fetch the whole checkpoint again"
            )
        parts: dict[tuple[torch.dtype, int, AxisShare], torch.Tensor | None] = {}
        for parameter, place in uses:
            if parameter.read_part(place, item):
                continue
            key = (parameter.dtype, place.dim, place.share)
            if key not in parts:
                parts[key] = _read(item, place, parameter.dtype)
            parameter.make_room()
            place.fill(parameter.data, parts[key])
        self._filled[item.name] = item.file
        parts.clear()  # before a layer packs its weight
        for parameter, _ in uses:
            self._open[id(parameter)] -= 1
            if self._open[id(parameter)] == 0 and parameter.on_filled is not None:
                parameter.on_filled()

    def assert_complete(self) -> None:
        """Raise unless every place is filled."""
        missing = [uses[0][1] for name, uses in self._uses.items() if name not in self._filled]
        if missing:
            shown = ", ".join(f"{place.name} {place.source_shape}" for place in missing[:5])
            shown += f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            files = ", ".join(sorted(set(self._filled.values()))[:3]) or "no file"
            raise ValueError(
                f"{len(missing)} tensors are missing from the checkpoint (read: {files}): "
                f"the model needs {shown}; fetch the whole checkpoint again"
            )


def _read(item: WeightItem, place: Place, dtype: torch.dtype) -> torch.Tensor | None:
    """The part of a tensor that a place holds, with its shape checked; None if it holds no row."""
    share = place.share
    if share.length == 0:
        return None
    source = item.load(dtype) if place.is_whole else item.load(dtype, place.dim, share.start, share.length)
    if tuple(source.shape) != place.part_shape:
        raise ValueError(
            f"tensor {item.name} in {item.file}: read as shape {tuple(source.shape)}, "
            f"its header says {item.shape}, the model needs {place.part_shape}"
        )
    return source

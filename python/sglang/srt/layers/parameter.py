"""Owns how checkpoint tensors reach parameters: places that know their shard, and the ledger that counts
them.

Read by layers (which declare places), models (which open a ledger over themselves) and loaders (which yield
`WeightItem`). It must not know file formats or model names; widths and ranks arrive as plain numbers from the
layer that asked the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class WeightItem:
    """One tensor of a checkpoint, not read yet.

    `name` is the Hugging Face name whatever the file format is, `file` is what an error names, and
    `load(dtype)` reads and converts the whole tensor; `nbytes` is its size in the file, for the progress bar.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    load: Callable[[torch.dtype], torch.Tensor]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor lies in a parameter: rows `start : start + length` of the parameter's
    dimension `dim` hold the tensor's `source_start : source_start + length` of the same dimension.

    `source_shape` is the shape of the whole tensor in the file. A full tensor has `source_start` 0 and covers
    everything.
    """

    name: str
    source_shape: tuple[int, ...]
    dim: int
    start: int
    source_start: int
    length: int

    @classmethod
    def full(cls, name: str, shape: tuple[int, ...]) -> Place:
        """Every rank holds the whole tensor."""
        return cls(name, shape, 0, 0, 0, shape[0])

    @classmethod
    def shard(
        cls, name: str, shape: tuple[int, ...], *, dim: int, rank: int, size: int, start: int = 0
    ) -> Place:
        """Rank `rank` of `size` holds an equal slice along `dim`; a fused parameter puts it at `start`.

        Column shards (output features) cut dimension 0 of a weight [out, in], row shards (input features)
        dimension 1.
        """
        if shape[dim] % size:
            raise ValueError(
                f"{name}: dimension {dim} of {tuple(shape)} does not divide by the tensor-parallel width "
                f"{size}; choose a width that divides {shape[dim]}"
            )
        length = shape[dim] // size
        return cls(name, shape, dim, start, rank * length, length)

    def copy_into(self, parameter: torch.Tensor, source: torch.Tensor) -> None:
        """Copy this rank's slice of `source` to its rows of `parameter`."""
        piece = source.narrow(self.dim, self.source_start, self.length)
        parameter.narrow(self.dim, self.start, self.length).copy_(piece)


class LoadableParameter(nn.Parameter):
    """A parameter that lists the places of all checkpoint tensors it is made of.

    `on_filled` runs once, when the last place is filled: that is where a linear layer packs its weight, so
    that the plain and the packed form of the whole model never exist at the same time.
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


def _assert_places_tile(parameter: LoadableParameter) -> None:
    """Our own arithmetic: the places of a parameter follow one another and leave no row out."""
    position = 0
    for place in parameter.places:
        shape = list(place.source_shape)
        shape[place.dim] = parameter.shape[place.dim]
        assert list(parameter.shape) == shape, (
            f"{place.name}: {tuple(parameter.shape)} cannot hold {place.source_shape}"
        )
        assert place.start == position, f"{place.name} starts at {place.start}, expected {position}"
        position += place.length
    dim = parameter.places[0].dim
    assert position == parameter.shape[dim], (
        f"{parameter.places[-1].name} ends at {position} of {parameter.shape[dim]}"
    )


class WeightLedger:
    """Counts what a model still wants: each place is filled exactly once, by a tensor of exactly its shape.

    `spare` names tensors that a checkpoint may carry although nothing holds them (the copy of a tied head),
    with the shape they must have. All complaints are `ValueError`s that name the tensor, the file and both
    shapes.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, spare: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self._wanted: dict[str, tuple[LoadableParameter, Place]] = {}
        self._open: dict[int, int] = {}  # id of a parameter -> places not filled yet
        self._filled: dict[str, str] = {}  # tensor -> file that filled it
        self._spare = dict(spare or {})
        for parameter in parameters:
            if not isinstance(parameter, LoadableParameter):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} does not say how it is loaded; "
                    "create it as a LoadableParameter"
                )
            self._open[id(parameter)] = len(parameter.places)
            for place in parameter.places:
                assert place.name not in self._wanted, f"{place.name} has two places"
                self._wanted[place.name] = (parameter, place)

    def fill_all(self, items: Iterable[WeightItem]) -> None:
        """Take every item, then insist that nothing is missing."""
        with torch.no_grad():
            for item in items:
                self.fill(item)
        self.assert_complete()

    def fill(self, item: WeightItem) -> None:
        """Check the item's name and shape before its bytes are read, then copy it to its place."""
        if item.name in self._spare:
            self._check_shape(item, self._spare[item.name])
            return
        if item.name not in self._wanted:
            raise ValueError(
                f"tensor {item.name} in {item.file}, shape {tuple(item.shape)}: the model has no place "
                "for it; the checkpoint does not belong to this architecture or configuration"
            )
        if item.name in self._filled:
            raise ValueError(
                f"tensor {item.name} in {item.file}, shape {tuple(item.shape)}: it was already loaded from "
                f"{self._filled[item.name]}; a checkpoint must hold each tensor once"
            )
        parameter, place = self._wanted[item.name]
        self._check_shape(item, place.source_shape)
        source = item.load(parameter.dtype)
        if tuple(source.shape) != place.source_shape:
            raise ValueError(
                f"tensor {item.name} in {item.file}: read as shape {tuple(source.shape)}, "
                f"its header says {tuple(item.shape)}, the model needs {place.source_shape}"
            )
        place.copy_into(parameter.data, source)
        self._filled[item.name] = item.file
        self._open[id(parameter)] -= 1
        if self._open[id(parameter)] == 0 and parameter.on_filled is not None:
            parameter.on_filled()

    def missing(self) -> Iterator[Place]:
        """The places that no tensor has filled."""
        return (place for name, (_, place) in self._wanted.items() if name not in self._filled)

    def assert_complete(self) -> None:
        """Raise unless every place is filled."""
        missing = list(self.missing())
        if missing:
            shown = ", ".join(f"{place.name} {place.source_shape}" for place in missing[:5])
            shown += f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            files = ", ".join(sorted(set(self._filled.values()))[:3]) or "no file"
            raise ValueError(
                f"{len(missing)} tensors are missing from the checkpoint (read: {files}): "
                f"the model needs {shown}"
            )

    @staticmethod
    def _check_shape(item: WeightItem, expected: tuple[int, ...]) -> None:
        if tuple(item.shape) != tuple(expected):
            raise ValueError(
                f"tensor {item.name} in {item.file} has shape {tuple(item.shape)}, "
                f"the model needs {tuple(expected)}"
            )

"""GGUF models split over several files: which files belong together, and one header for all of them.

Owns the names of parts (`MODEL-00001-of-00003.gguf`) and what must agree between them. The first part holds
the metadata of the whole, the others only tensors and their own number. The model path, the model config, the
weight reader and the tokenizer read it and never see that a model has parts.
"""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from sglang.srt.configs.gguf.header import GGUFHeader

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_SHOWN = 4


class PartName(NamedTuple):
    """What the name of a part says; `number` counts from 1, up to `total`."""

    model: str
    number: int
    total: int

    @classmethod
    def of(cls, path: pathlib.Path) -> PartName | None:
        match = _NAME.fullmatch(path.name)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))

    def file(self, number: int) -> str:
        """The name of another part of the same model."""
        return f"{self.model}-{number:05d}-of-{self.total:05d}.gguf"


def open_gguf(path: pathlib.Path) -> GGUFHeader:
    """The header of a model; `path` is its only file or any of its parts.

    A part is refused unless all others lie beside it and agree with it.
    """
    header = GGUFHeader(path)
    if not is_split(header):
        return header
    paths = _all_parts(header)
    first = header if path == paths[0] else GGUFHeader(paths[0])
    for index, other in enumerate(paths):
        part = first if index == 0 else GGUFHeader(other)
        _compare(first, part, index, len(paths))
        if part is not first:
            first.join(part)
    announced = first.require("split.tensors.count", int)
    if announced != len(first.tensors):
        raise ValueError(
            f"{first.path} and the {len(paths) - 1} parts beside it hold {len(first.tensors)} tensors, the "
            f"metadata announces {announced}; they are not the parts of one model: fetch all of them again"
        )
    return first


def is_split(header: GGUFHeader) -> bool:
    """Whether this file is one of several; a merged file may keep a count of 0."""
    return header.optional("split.count", int, 1) > 1


def first_part(path: pathlib.Path) -> pathlib.Path:
    """The first part of the model where `path` is another part of it, else `path` itself."""
    name = PartName.of(path)
    if name is None or name.number == 1:
        return path
    first = path.with_name(name.file(1))
    return first if first.is_file() and is_split(GGUFHeader(path)) else path


def models_among(files: list[pathlib.Path]) -> list[pathlib.Path]:
    """One file for each model of a folder: the first of its parts."""
    models: dict[object, pathlib.Path] = {}
    for file in sorted(files):
        name = PartName.of(file)
        models.setdefault(file if name is None else (name.model, name.total), file)
    if len(files) > 1 and len(models) == 1 and not is_split(GGUFHeader(min(files))):
        return sorted(files)  # named like parts, and each is a model
    return list(models.values())


def _all_parts(header: GGUFHeader) -> list[pathlib.Path]:
    """The files of all parts of the model that this file is a part of, in order."""
    path, count = header.path, header.require("split.count", int)
    number = header.require("split.no", int) + 1
    name = PartName.of(path)
    if name is None or (name.number, name.total) != (number, count):
        raise ValueError(
            f"{path} is part {number} of {count} of a split model by its metadata, and parts are found by "
            f"name: give it back its own, which ends in -{number:05d}-of-{count:05d}.gguf"
        )
    paths = [path.with_name(name.file(other)) for other in range(1, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        names = ", ".join(missing[:_SHOWN])
        names += f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{path} is one part of several ({number} of {count} of a split model), and not beside it are "
            f"{names}; fetch what is missing into {path.parent}"
        )
    return paths


def _compare(first: GGUFHeader, part: GGUFHeader, index: int, count: int) -> None:
    """A part has the number that its name says, and contradicts the first one in nothing."""
    expected = {"split.no": index, "split.count": count}
    shared = (key for key in part.metadata if key in first.metadata)
    for key in (*expected, *shared):
        wanted = expected[key] if key in expected else first.metadata[key]
        found = part.metadata.get(key)
        if found != wanted:
            raise ValueError(
                f"{part.path}: metadata {key!r} is {found!r:.60}, as part {index + 1} of the model of "
                f"{first.path.name} it must be {wanted!r:.60}; fetch the parts of one model into one folder"
            )

"""Owns the weights of a Hugging Face folder: one safetensors file, or shards behind an index.

All files are checked, also against the index, before the first tensor is read. Read by the loader. It must
not load pickled checkpoints.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import pathlib
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.utf8 import check_utf8
from sglang.srt.layers.weights.parameter import WeightItem

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Bytes of a value in the types that weights are read from.
_WEIGHT_TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LARGEST_HEADER = 100 << 20


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def safetensors_weights(folder: pathlib.Path) -> list[WeightItem]:
    """One item for each tensor of the checkpoint, in the order of the files."""
    index = folder / INDEX_FILE
    items: list[WeightItem] = []
    files = _files(folder, index)
    unread = sorted(file.name for file in set(folder.glob("*.safetensors")) - set(files))
    if unread:
        chosen = index.name if index.is_file() else SINGLE_FILE
        logger.info("Not read from %s: %s (the model is what %s holds)", folder, ", ".join(unread), chosen)
    for file, wanted in files.items():
        entries = read_header(file)
        if wanted is not None:
            _compare_with_index(index, file, wanted, set(entries))
        for name, entry in entries.items():
            _check_type(file, name, entry)
        handle = _open(file)
        for name, entry in entries.items():
            load = functools.partial(_load, handle, name)
            items.append(
                WeightItem(name=name, file=str(file), shape=entry.shape, load=load, nbytes=entry.nbytes)
            )
    return items


def _open(file: pathlib.Path) -> Any:
    """The library's own reader, which also looks for holes and overlaps between tensors."""
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is corrupt: {error}; fetch the file again") from error


def read_header(file: pathlib.Path) -> dict[str, _Entry]:
    """The tensors that a file announces, once its size is what they need."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise ValueError(
                    f"{file} is truncated or no safetensors file: its header needs {8 + length} bytes, the "
                    f"file has {size}"
                )
            raw = stream.read(length)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header is a {type(header).__name__}, it must be an object")
    header.pop("__metadata__", None)
    entries: dict[str, _Entry] = {}
    end = 0
    for name, row in header.items():
        entries[name], row_end = _entry(file, name, row)
        end = max(end, row_end)
    if 8 + length + end != size:
        raise ValueError(
            f"{file} is truncated or torn: its tensors end at byte {8 + length + end}, the file has {size} "
            f"bytes; fetch the file again"
        )
    return entries


def _entry(file: pathlib.Path, name: str, row: Any) -> tuple[_Entry, int]:
    try:
        dtype, shape = str(row["dtype"]), tuple(int(size) for size in row["shape"])
        begin, end = (int(offset) for offset in row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: the header row of tensor {name!r} is malformed: {row!r}") from error
    width = _WEIGHT_TYPES.get(dtype)
    if width is not None and end - begin != width * math.prod(shape):
        raise ValueError(
            f"{file}: tensor {name!r} of shape {list(shape)} in {dtype} needs {width * math.prod(shape)} "
            f"bytes, its header row gives it {end - begin}"
        )
    return _Entry(dtype, shape, end - begin), end


def _files(folder: pathlib.Path, index: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """The files of the checkpoint, each with the tensors that the index expects in it (None: no index)."""
    if index.is_file():
        return dict(_indexed_files(index))
    single = folder / SINGLE_FILE
    if single.is_file():
        return {single: None}
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        check_utf8(found[0], "the weight file")
        return {found[0]: None}
    if found:
        names = ", ".join(file.name for file in found)
        raise ValueError(
            f"{folder} holds {len(found)} safetensors files ({names}) and no {INDEX_FILE}; fetch it"
        )
    hint = (
        f"; fetch the weights into it ({SINGLE_FILE}, or all shards and {INDEX_FILE}), or name the folder "
        "that has them with --model-path"
    )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        hint = "; its .bin or .pt files are pickles, which are not loaded: save the model as safetensors"
    raise ValueError(f"{folder} holds no safetensors file{hint}")


def _indexed_files(index: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} has no readable weight_map: {error!r}; fetch it again") from error
    by_file: dict[str, set[str]] = {}
    for name, file in pairs:
        by_file.setdefault(file, set()).add(name)
    files: dict[pathlib.Path, set[str] | None] = {}
    for file, names in sorted(by_file.items()):
        path = index.parent / file
        if pathlib.Path(file).name != file or not path.is_file():
            raise ValueError(
                f"{index} places {len(names)} tensors (first: {min(names)!r}) in {file!r}, and there is no "
                f"such file beside it; fetch it"
            )
        files[path] = names
    return files


def _compare_with_index(index: pathlib.Path, file: pathlib.Path, wanted: set[str], found: set[str]) -> None:
    missing, surplus = sorted(wanted - found), sorted(found - wanted)
    if missing:
        raise ValueError(
            f"{file} lacks {len(missing)} of the {len(wanted)} tensors that {index.name} places in it, the "
            f"first is {missing[0]!r}; index and shard are not of one checkpoint"
        )
    if surplus:
        raise ValueError(
            f"{file} holds {len(surplus)} tensors that {index.name} does not place in it, the first is "
            f"{surplus[0]!r}; index and shard are not of one checkpoint"
        )


def _check_type(file: pathlib.Path, name: str, entry: _Entry) -> None:
    if entry.dtype not in _WEIGHT_TYPES:
        raise ValueError(
            f"{file}: tensor {name!r} is stored as {entry.dtype}, which is not read; known: "
            f"{', '.join(_WEIGHT_TYPES)}"
        )


def _load(
    handle: Any, name: str, dtype: torch.dtype, dim: int = 0, start: int = 0, length: int | None = None
) -> torch.Tensor:
    """The whole tensor, or only the asked part of the file's map."""
    if length is None:
        tensor: torch.Tensor = handle.get_tensor(name)
    else:
        tensor = handle.get_slice(name)[(slice(None),) * dim + (slice(start, start + length),)]
    return tensor.to(dtype)

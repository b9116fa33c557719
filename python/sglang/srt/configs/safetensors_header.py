"""The tensors that a safetensors checkpoint announces: names, types and shapes, without their bytes.

Owns which files of a folder are the checkpoint, their headers and the index over shards. Read by the loader,
and by the configs of drafts, which trust the tensors more than their config. It must not import torch.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

from sglang.srt.configs.utf8 import check_utf8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Bytes of a value in the types that weights are read from.
WEIGHT_TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Whole numbers that are a weight together with a tensor of scales: name.weight and name.weight_scale.
INT8, SCALE_SUFFIX = "I8", "_scale"
_LARGEST_HEADER = 100 << 20


class TensorEntry(NamedTuple):
    """One tensor of a file: the name of its type in the header, its shape and its size."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def checkpoint_entries(folder: pathlib.Path) -> dict[pathlib.Path, dict[str, TensorEntry]]:
    """The files of the checkpoint in order, each with its tensors by name.

    All are checked, also against the index: ValueError names the file and what is wrong with it.
    """
    index = folder / INDEX_FILE
    found: dict[pathlib.Path, dict[str, TensorEntry]] = {}
    for file, wanted in _files(folder, index).items():
        found[file] = read_header(file)
        if wanted is not None:
            _compare_with_index(index, file, wanted, set(found[file]))
    return found


def read_header(file: pathlib.Path) -> dict[str, TensorEntry]:
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
    entries: dict[str, TensorEntry] = {}
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


def _entry(file: pathlib.Path, name: str, row: Any) -> tuple[TensorEntry, int]:
    try:
        dtype, shape = str(row["dtype"]), tuple(int(size) for size in row["shape"])
        begin, end = (int(offset) for offset in row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: the header row of tensor {name!r} is malformed: {row!r}") from error
    width = WEIGHT_TYPES.get(dtype)
    if width is not None and end - begin != width * math.prod(shape):
        raise ValueError(
            f"{file}: tensor {name!r} of shape {list(shape)} in {dtype} needs {width * math.prod(shape)} "
            f"bytes, its header row gives it {end - begin}"
        )
    return TensorEntry(dtype, shape, end - begin), end


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

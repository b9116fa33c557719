"""Owns the weights of a Hugging Face folder: one safetensors file, or shards behind an index.

All headers are checked (`configs/safetensors_header.py`) before the first tensor is read. Read by the loader.
It must not load pickled checkpoints.
"""

from __future__ import annotations

import functools
import logging
import pathlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.safetensors_header import (
    INDEX_FILE,
    INT8,
    SINGLE_FILE,
    WEIGHT_TYPES,
    TensorEntry,
    checkpoint_entries,
)
from sglang.srt.layers.weights.parameter import WeightItem
from sglang.srt.model_loader.int8_tensors import with_scales

logger = logging.getLogger(__name__)

#: A file is opened again once so many bytes of it were read.
_MOST_HELD = 32 << 20
#: Tensors that are no weights but say which tokens a draft knows.
_TOKEN_MAPS = ("d2t", "t2d")


def safetensors_weights(folder: pathlib.Path) -> list[WeightItem]:
    """One item for each tensor of the checkpoint, in the order of the files."""
    items: list[WeightItem] = []
    files, reader = checkpoint_entries(folder), _Reader()
    unread = sorted(file.name for file in set(folder.glob("*.safetensors")) - set(files))
    if unread:
        chosen = INDEX_FILE if (folder / INDEX_FILE).is_file() else SINGLE_FILE
        logger.info("Not read from %s: %s (the model is what %s holds)", folder, ", ".join(unread), chosen)
    for file, entries in files.items():
        for name, entry in entries.items():
            _check_type(file, name, entry)
        reader.check(file)
        for name, entry in entries.items():
            load = functools.partial(reader.load, file, name, entry)
            items.append(
                WeightItem(name=name, file=str(file), shape=entry.shape, load=load, nbytes=entry.nbytes)
            )
    numbers = {name for rows in files.values() for name, entry in rows.items() if entry.dtype == INT8}
    return with_scales(items, numbers)


def _check_type(file: pathlib.Path, name: str, entry: TensorEntry) -> None:
    is_int8 = entry.dtype == INT8 and name.endswith(".weight")
    if entry.dtype not in WEIGHT_TYPES and not is_int8 and name.removeprefix("model.") not in _TOKEN_MAPS:
        raise ValueError(
            f"{file}: tensor {name!r} is stored as {entry.dtype}, which is not read; known: "
            f"{', '.join(WEIGHT_TYPES)}"
        )


class _Reader:
    """Reads tensors with the library's own reader, which also looks for holes and overlaps between them.

    A file is shown in memory, and what was read of it stays there until it is closed, beside the parameters
    that it was copied to. So one file is open at a time, and is opened again now and then; not for every
    tensor, because files of many experts have long headers.
    """

    def __init__(self) -> None:
        self._file: pathlib.Path | None = None
        self._handle: Any = None
        self._held = 0  # bytes

    def check(self, file: pathlib.Path) -> None:
        """ValueError where the library finds the file corrupt."""
        self._turn_to(file)

    def load(
        self,
        file: pathlib.Path,
        name: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
    ) -> torch.Tensor:
        """The whole tensor, or only the asked part of it."""
        if self._file != file or self._held >= _MOST_HELD:
            self._turn_to(file)
        if length is None:
            self._held += entry.nbytes
            tensor: torch.Tensor = self._handle.get_tensor(name)
        else:
            # Whole pages are held: of a part of every row, those of the whole tensor.
            self._held += entry.nbytes if dim else entry.nbytes * length // max(entry.shape[0], 1)
            part = (slice(None),) * dim + (slice(start, start + length),)
            tensor = self._handle.get_slice(name)[part]
        return tensor.to(dtype)

    def _turn_to(self, file: pathlib.Path) -> None:
        self._file = self._handle = None  # closed before another one is opened
        self._handle, self._held = _open(file), 0
        self._file = file


def _open(file: pathlib.Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is corrupt: {error}; fetch the file again") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error

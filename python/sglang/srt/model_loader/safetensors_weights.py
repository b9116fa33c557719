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

#: Tensors that are no weights but say which tokens a draft knows.
_TOKEN_MAPS = ("d2t", "t2d")


def safetensors_weights(folder: pathlib.Path) -> list[WeightItem]:
    """One item for each tensor of the checkpoint, in the order of the files."""
    items: list[WeightItem] = []
    files = checkpoint_entries(folder)
    unread = sorted(file.name for file in set(folder.glob("*.safetensors")) - set(files))
    if unread:
        chosen = INDEX_FILE if (folder / INDEX_FILE).is_file() else SINGLE_FILE
        logger.info("Not read from %s: %s (the model is what %s holds)", folder, ", ".join(unread), chosen)
    for file, entries in files.items():
        for name, entry in entries.items():
            _check_type(file, name, entry)
        handle = _open(file)
        for name, entry in entries.items():
            load = functools.partial(_load, handle, name)
            items.append(
                WeightItem(name=name, file=str(file), shape=entry.shape, load=load, nbytes=entry.nbytes)
            )
    numbers = {name for rows in files.values() for name, entry in rows.items() if entry.dtype == INT8}
    return with_scales(items, numbers)


def _open(file: pathlib.Path) -> Any:
    """The library's own reader, which also looks for holes and overlaps between tensors."""
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is corrupt: {error}; fetch the file again") from error


def _check_type(file: pathlib.Path, name: str, entry: TensorEntry) -> None:
    is_int8 = entry.dtype == INT8 and name.endswith(".weight")
    if entry.dtype not in WEIGHT_TYPES and not is_int8 and name.removeprefix("model.") not in _TOKEN_MAPS:
        raise ValueError(
            f"{file}: tensor {name!r} is stored as {entry.dtype}, which is not read; known: "
            f"{', '.join(WEIGHT_TYPES)}"
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

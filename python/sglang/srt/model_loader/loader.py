"""Owns the loading of a model: the choice of a reader, progress and the two log lines.

Read by the model runner. It must not import models: a model is anything that `LoadsWeights`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from tqdm import tqdm

from sglang.srt.configs.model_config import LOAD_FORMATS, ModelConfig
from sglang.srt.layers.weights.parameter import WeightItem, bytes_to_read
from sglang.srt.model_loader.dummy import dummy_weights
from sglang.srt.model_loader.gguf.reader import gguf_weights
from sglang.srt.model_loader.safetensors_weights import safetensors_weights
from sglang.srt.model_loader.spare_tensors import put_aside
from sglang.srt.platforms import available_memory_bytes, return_free_memory

logger = logging.getLogger(__name__)

_GIB = 1 << 30
#: Freed memory is returned so many times while a model is loaded, and not before so many bytes were read.
_STEPS, _LEAST_STEP = 16, 8 << 20


class LoadsWeights(Protocol):
    """What a model offers to the loader; it checks names and shapes and that nothing stays unfilled."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def load_weights(self, weights: Iterable[WeightItem], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model, none of them loaded yet, and the config of the model that holds all of them."""

    config: ModelConfig
    items: list[WeightItem]


def open_checkpoint(model_config: ModelConfig, load_format: str, dtype: torch.dtype) -> Checkpoint:
    """All files, opened and checked.

    Build the model from the config that comes back: where the files hold a head of its own, it no longer says
    that the head is tied.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not served; known: {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        items = dummy_weights(model_config, dtype)
    elif model_config.source == "gguf":
        if load_format == "safetensors":
            raise ValueError(
                f"load_format 'safetensors' needs a folder, and {model_config.path} is a GGUF file"
            )
        items = gguf_weights(model_config)
    else:
        if load_format == "gguf":
            raise ValueError(f"load_format 'gguf' needs a .gguf file, and {model_config.path} is a folder")
        items = safetensors_weights(model_config.path)
    return Checkpoint(*put_aside(model_config, items, dtype))


def load_model(
    model: LoadsWeights, checkpoint: Checkpoint, *, dtype: torch.dtype, show_progress: bool = False
) -> None:
    """Fill `model` from its checkpoint.

    `show_progress` draws a bar on stderr, with the bytes that this rank reads and their rate.
    """
    before = available_memory_bytes()
    logger.info("Load weight begin. avail mem=%.2f GB, path=%s", before / _GIB, checkpoint.config.path)
    started = time.perf_counter()
    items = checkpoint.items
    nbytes = bytes_to_read(model.parameters(), items)
    reading = _with_progress(items, nbytes) if show_progress else items
    model.load_weights(_returning_memory(reading, nbytes))
    after = available_memory_bytes()
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.perf_counter() - started,
        checkpoint.config.architecture,
        str(dtype).removeprefix("torch."),
        after / _GIB,
        (before - after) / _GIB,
    )


def _returning_memory(items: Iterable[WeightItem], nbytes: dict[str, int]) -> Iterator[WeightItem]:
    """The items; memory that was freed between them goes back to the system now and then.

    A layer's weight is freed when it is packed, and what the next ones take does not fit into the gaps: the
    allocator would keep half of the model's size for nothing until the end.
    """
    step = max(_LEAST_STEP, sum(nbytes.values()) // _STEPS)
    read = 0
    for item in items:
        yield item
        read += nbytes[item.name]
        if read >= step:
            return_free_memory()
            read = 0


def _with_progress(items: list[WeightItem], nbytes: dict[str, int]) -> Iterator[WeightItem]:
    """The items, with a bar on stderr that moves when the next one is asked for."""
    total = sum(nbytes[item.name] for item in items)
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
    ) as bar:
        for item in items:
            yield item
            bar.update(nbytes[item.name])

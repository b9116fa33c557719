"""Owns int8 tensors of a checkpoint: each is made one weight with the tensor of its scales.

Read by the reader of safetensors. It must not decide what is computed in int8: a weight can also be loaded as
the numbers that it stands for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from sglang.srt.configs.safetensors_header import SCALE_SUFFIX
from sglang.srt.layers.weights.parameter import WeightItem


def with_scales(items: Iterable[WeightItem], numbers: Iterable[str]) -> list[WeightItem]:
    """`items`, where those named in `numbers` have taken in their scales: one for each output.

    ValueError names the tensor whose scales are missing or of another shape.
    """
    by_name = {item.name: item for item in items}
    for name in numbers:
        item, scales = by_name[name], by_name.pop(f"{name}{SCALE_SUFFIX}", None)
        if scales is None:
            raise ValueError(
                f"{item.file}: tensor {name} is stored as I8, and the checkpoint holds no "
                f"{name}{SCALE_SUFFIX}; fetch the whole checkpoint again"
            )
        if len(item.shape) != 2 or scales.shape not in ((item.shape[0],), (item.shape[0], 1)):
            raise ValueError(
                f"{scales.file}: tensor {scales.name} has shape {scales.shape}; of int8 weights {item.shape} "
                "one scale for each output is served, and no other form"
            )
        by_name[name] = dataclasses.replace(
            item,
            load=functools.partial(_load, item, scales),
            load_int8=functools.partial(_load_int8, item, scales),
            nbytes=item.nbytes + scales.nbytes,
        )
    return list(by_name.values())


def _load_int8(
    numbers: WeightItem, scales: WeightItem, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers.load(torch.int8, 0, start, length), scales.load(torch.float32, 0, start, length).view(-1)


def _load(
    numbers: WeightItem,
    scales: WeightItem,
    dtype: torch.dtype,
    dim: int = 0,
    start: int = 0,
    length: int | None = None,
) -> torch.Tensor:
    """The values that the numbers stand for."""
    count = numbers.shape[dim] - start if length is None else length
    rows = (start, count) if dim == 0 else (0, numbers.shape[0])
    factors = scales.load(torch.float32, 0, *rows).view(-1, 1)
    return (numbers.load(torch.float32, dim, start, count) * factors).to(dtype)

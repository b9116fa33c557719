"""Weights of a GGUF file under Hugging Face names.

Owns the order of rows inside q and k, which GGUF files of Llama models shuffle. Read by the loader. It must
not parse the header (`configs/gguf/header.py`) or decode blocks (`dequant.py`).
"""

from __future__ import annotations

import functools
import math

import torch

from sglang.srt.configs.gguf.header import GGUFHeader, GGUFTensorInfo
from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.weights.blocks import BlockPart
from sglang.srt.layers.weights.parameter import WeightItem
from sglang.srt.model_loader.gguf.dequant import DECODERS, SPLITTERS, dequantize, split_rows
from sglang.srt.model_loader.gguf.names import CONFIG_TENSORS, hf_name


def gguf_weights(model_config: ModelConfig) -> list[WeightItem]:
    """One item for each tensor; the files are checked now, tensors are decoded when they are loaded."""
    header = open_gguf(model_config.path)
    items: list[WeightItem] = []
    for tensor in header.tensors.values():
        if tensor.name in CONFIG_TENSORS:
            continue
        name = hf_name(tensor.name)
        if name is None:
            raise ValueError(
                f"{tensor.path}: nobody wants tensor {tensor.name!r} of shape {list(tensor.shape)}; a "
                f"{model_config.architecture} has no such part"
            )
        if tensor.type.name not in DECODERS:
            raise ValueError(
                f"{tensor.path}: tensor {tensor.name!r} is stored as {tensor.type.name}, which is not read; "
                f"known: {', '.join(DECODERS)}"
            )
        heads = _shuffled_heads(name, model_config)
        load = functools.partial(_load, header, tensor, heads)
        load_blocks = functools.partial(_load_blocks, header, tensor, heads)
        items.append(
            WeightItem(
                name=name,
                file=str(tensor.path),
                shape=tensor.shape,
                load=load,
                nbytes=tensor.nbytes,
                block=tensor.type.block_elements,
                load_blocks=load_blocks if tensor.type.name in SPLITTERS and len(tensor.shape) == 2 else None,
            )
        )
    header.prefetch()
    return items


def _shuffled_heads(name: str, model_config: ModelConfig) -> int | None:
    """How many heads' rows are shuffled in this tensor; None where rows stand in their natural order."""
    if model_config.model_type != "llama":
        return None
    if ".self_attn.q_proj." in name:
        return model_config.num_heads
    return model_config.num_kv_heads if ".self_attn.k_proj." in name else None


def _load(
    header: GGUFHeader,
    tensor: GGUFTensorInfo,
    heads: int | None,
    dtype: torch.dtype,
    dim: int = 0,
    start: int = 0,
    length: int | None = None,
) -> torch.Tensor:
    """A part of a tensor, in the order of rows that the model wants.

    Whole rows are cut out of the file, and of the last dimension only the blocks that hold it are decoded.
    """
    what = f"{tensor.path}: tensor {tensor.name!r}"
    shape = tensor.shape
    length = shape[dim] - start if length is None else length
    if dim not in (0, len(shape) - 1):
        raise ValueError(f"{what} of shape {list(shape)} cannot be cut along dimension {dim}")
    first, last = _whole_heads(tensor, heads, dim, start, length)
    data, columns = header.data(tensor), None
    if dim == len(shape) - 1:
        columns = (first, last - first)
    else:
        row = tensor.type.nbytes(math.prod(shape[1:]))
        data, shape = data[first * row : last * row], (last - first, *shape[1:])
    weight = dequantize(data, tensor.type, shape, dtype, what, columns)
    header.release(tensor)
    return _natural_rows(weight, tensor, heads).narrow(dim, start - first, length)


def _load_blocks(
    header: GGUFHeader, tensor: GGUFTensorInfo, heads: int | None, dim: int, start: int, length: int
) -> BlockPart:
    """A part of a matrix as whole numbers with scales; of the last dimension, multiples of 32."""
    rows, width = tensor.shape
    first, last = _whole_heads(tensor, heads, dim, start, length)
    data, columns = header.data(tensor), (0, width)
    if dim == 0:
        row = tensor.type.nbytes(width)
        data, rows = data[first * row : last * row], last - first
    else:
        columns = (start, length)
    found = split_rows(data, tensor.type, rows, width, columns)
    header.release(tensor)

    def cut(values: torch.Tensor) -> torch.Tensor:
        values = _natural_rows(values, tensor, heads)
        return values if dim > 0 else values.narrow(0, start - first, length)

    numbers = torch.from_numpy(found.numbers).to(torch.int8).reshape(rows, -1)
    assert numbers.shape[1] == found.scales.shape[1] * found.numbers.shape[2]
    minima = None if found.minima is None else cut(torch.from_numpy(found.minima))
    return BlockPart(cut(numbers), cut(torch.from_numpy(found.scales)), minima)


def _whole_heads(
    tensor: GGUFTensorInfo, heads: int | None, dim: int, start: int, length: int
) -> tuple[int, int]:
    """What is read for this part of a dimension: shuffled rows stay within their head, so whole heads."""
    if heads is not None and tensor.shape[0] % (2 * heads):
        raise ValueError(
            f"{tensor.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which are not {heads} heads "
            "of an even size"
        )
    unit = 1 if heads is None or dim > 0 else tensor.shape[0] // heads
    return start // unit * unit, -(-(start + length) // unit) * unit


def _natural_rows(weight: torch.Tensor, tensor: GGUFTensorInfo, heads: int | None) -> torch.Tensor:
    """Rows of whole heads in the order of the model.

    Within a head the file alternates rows of the two rotary halves: [heads, half, 2, ...] -> [heads, 2, half,
    ...].
    """
    if heads is None:
        return weight
    half = tensor.shape[0] // heads // 2
    return weight.reshape(-1, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)

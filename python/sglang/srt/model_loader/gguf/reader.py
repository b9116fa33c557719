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
from sglang.srt.layers.weights.parameter import WeightItem
from sglang.srt.model_loader.gguf.dequant import DECODERS, dequantize
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
        load = functools.partial(_load, header, tensor, _shuffled_heads(name, model_config))
        items.append(
            WeightItem(
                name=name,
                file=str(tensor.path),
                shape=tensor.shape,
                load=load,
                nbytes=tensor.nbytes,
                block=tensor.type.block_elements,
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
    if heads is not None and shape[0] % (2 * heads):
        raise ValueError(f"{what} has {shape[0]} rows, which are not {heads} heads of an even size")
    if dim not in (0, len(shape) - 1):
        raise ValueError(f"{what} of shape {list(shape)} cannot be cut along dimension {dim}")
    # Shuffled rows stay within their head, so they are read by whole heads.
    unit = 1 if heads is None or dim > 0 else shape[0] // heads
    first, last = start // unit * unit, -(-(start + length) // unit) * unit
    data, columns = header.data(tensor), None
    if dim == len(shape) - 1:
        columns = (first, last - first)
    else:
        row = tensor.type.nbytes(math.prod(shape[1:]))
        data, shape = data[first * row : last * row], (last - first, *shape[1:])
    weight = dequantize(data, tensor.type, shape, dtype, what, columns)
    if heads is not None:
        # Within a head the file alternates rows of the two rotary halves: [heads, half, 2, ...] -> [heads,
        # 2, half, ...]
        half = tensor.shape[0] // heads // 2
        pairs = weight.view(-1, half, 2, *weight.shape[1:])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return weight.narrow(dim, start - first, length)

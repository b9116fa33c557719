"""Owns the linear layers by the way their weight is cut over ranks: by output features, by input features,
and the two fused kinds (query/key/value, gate/up).

Read by models. Each knows the checkpoint tensors it is made of; how the weight is stored belongs to its
linear method. Widths and ranks are read from the context at construction, groups when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from sglang.srt.distributed.communication_op import (
    attention_tensor_parallel_all_reduce,
    tensor_model_parallel_all_reduce,
)
from sglang.srt.layers.parameter import LoadableParameter, Place
from sglang.srt.layers.quantization.base_config import LinearMethod
from sglang.srt.runtime_context import get_parallel

Axis = Literal["tp", "attn_tp"]


def axis_place(axis: Axis) -> tuple[int, int]:
    """(rank, width) of this rank on the axis that cuts a layer."""
    parallel = get_parallel()
    if axis == "tp":
        return parallel.tp_rank, parallel.tp_size
    return parallel.attn_tp_rank, parallel.attn_tp_size


class ColumnParallelLinear(nn.Module):
    """Output features cut over ranks: x [rows, in] -> [rows, out / width].

    `outputs` lists the checkpoint tensors (name without `.weight`, output features) that lie one after
    another in the fused weight, each cut on its own.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, int]],
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
        axis: Axis = "tp",
    ) -> None:
        super().__init__()
        rank, width = axis_place(axis)
        self.method = method
        weights: list[Place] = []
        biases: list[Place] = []
        start = 0
        for name, features in outputs:
            cut = {"dim": 0, "rank": rank, "size": width, "start": start}
            weights.append(Place.shard(f"{name}.weight", (features, in_features), **cut))
            biases.append(Place.shard(f"{name}.bias", (features,), **cut))
            start += weights[-1].length
        self.out_features = start
        method.create_weights(self, (start, in_features), weights, dtype)
        self.bias = LoadableParameter(torch.empty(start, dtype=dtype), biases) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Gate and up projection in one weight: the output is [gate | up], each cut over ranks."""

    def __init__(
        self,
        prefix: str,
        in_features: int,
        features: int,
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        outputs = [(f"{prefix}.gate_proj", features), (f"{prefix}.up_proj", features)]
        super().__init__(in_features, outputs, method=method, dtype=dtype, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projection in one weight: the output is [q heads | k heads | v heads] of this
    rank.
    """

    def __init__(
        self,
        prefix: str,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        _, width = axis_place("attn_tp")
        if num_heads % width or num_kv_heads % width:
            raise ValueError(
                f"{prefix}: {num_heads} query and {num_kv_heads} key/value heads do not divide by the "
                f"attention tensor-parallel width {width}; choose a width that divides both"
            )
        self_heads = (num_heads, num_kv_heads, num_kv_heads)
        outputs = [
            (f"{prefix}.{part}_proj", heads * head_dim) for part, heads in zip("qkv", self_heads, strict=True)
        ]
        super().__init__(in_features, outputs, method=method, dtype=dtype, bias=bias, axis="attn_tp")
        self.num_heads = num_heads // width
        self.num_kv_heads = num_kv_heads // width


class RowParallelLinear(nn.Module):
    """Input features cut over ranks: x [rows, in / width] -> [rows, out], summed over the group."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
        axis: Axis = "tp",
    ) -> None:
        super().__init__()
        rank, self.width = axis_place(axis)
        self.method = method
        self.axis = axis
        place = Place.shard(f"{name}.weight", (out_features, in_features), dim=1, rank=rank, size=self.width)
        method.create_weights(self, (out_features, place.length), [place], dtype)
        full = [Place.full(f"{name}.bias", (out_features,))]
        self.bias = LoadableParameter(torch.empty(out_features, dtype=dtype), full) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.width == 1:
            return self.method.apply(self, x, self.bias)
        partial = self.method.apply(self, x, None)
        if self.axis == "tp":
            out = tensor_model_parallel_all_reduce(partial)
        else:
            out = attention_tensor_parallel_all_reduce(partial)
        return out if self.bias is None else out + self.bias

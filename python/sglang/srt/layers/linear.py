"""Owns the linear layers: cut over ranks by output or by input features, two fused kinds, one held whole.

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
from sglang.srt.layers.quantization.base_config import LinearMethod, StoredWeight
from sglang.srt.layers.weights.head_share import AxisShare, HeadShare
from sglang.srt.layers.weights.parameter import LoadableParameter, Place
from sglang.srt.runtime_context import get_parallel

Axis = Literal["tp", "attn_tp"]


def axis_place(axis: Axis) -> tuple[int, int]:
    """(rank, width) of this rank on the axis that cuts a layer."""
    parallel = get_parallel()
    if axis == "tp":
        return parallel.tp_rank, parallel.tp_size
    return parallel.attn_tp_rank, parallel.attn_tp_size


class ColumnParallelLinear(nn.Module):
    """Output features cut over ranks: x [rows, in] -> [rows, this rank's features].

    `outputs` lists the checkpoint tensors (name without `.weight`, output features) that lie one after
    another in the fused weight, each cut on its own: into equal parts, padded with zeros where they do not
    divide, or as `shares` says.
    """

    weight: LoadableParameter
    stored: StoredWeight

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, int]],
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
        axis: Axis = "tp",
        shares: Sequence[AxisShare] | None = None,
    ) -> None:
        super().__init__()
        if shares is None:
            rank, width = axis_place(axis)
            shares = [AxisShare.even(features, rank, width) for _, features in outputs]
        weights: list[Place] = []
        biases: list[Place] = []
        start = 0
        for (name, features), share in zip(outputs, shares, strict=True):
            weights.append(Place(f"{name}.weight", (features, in_features), 0, start, share))
            biases.append(Place(f"{name}.bias", (features,), 0, start, share))
            start += share.room
        method.create_weights(self, (start, in_features), weights, dtype)
        self.bias = LoadableParameter(torch.empty(start, dtype=dtype), biases) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stored.apply(x, self.bias)


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
    """Query, key and value projection in one weight: [q heads | k heads | v heads] of this rank.

    `heads` says which heads of the model these are; padding heads are included.
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
        rank, width = axis_place("attn_tp")
        heads = HeadShare.of(num_heads, num_kv_heads, width, rank)
        counts = (num_heads, num_kv_heads, num_kv_heads)
        super().__init__(
            in_features,
            [(f"{prefix}.{part}_proj", count * head_dim) for part, count in zip("qkv", counts, strict=True)],
            method=method,
            dtype=dtype,
            bias=bias,
            axis="attn_tp",
            shares=[share.times(head_dim) for share in (heads.q, heads.kv, heads.kv)],
        )
        self.heads = heads
        self.num_heads = heads.q.room
        self.num_kv_heads = heads.kv.room


class RowParallelLinear(nn.Module):
    """Input features cut over ranks: x [rows, this rank's features] -> [rows, out], summed over the group.

    The features are cut into equal parts, or as `share` says where the layer before is cut otherwise. With
    `reduce_results` off the partial sum comes back and the caller sums over the axis; rank 0 of the axis has
    added the bias.
    """

    weight: LoadableParameter
    stored: StoredWeight

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
        share: AxisShare | None = None,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.rank, self.width = axis_place(axis)
        self.axis = axis
        self.reduce_results = reduce_results
        share = AxisShare.even(in_features, self.rank, self.width) if share is None else share
        place = Place(f"{name}.weight", (out_features, in_features), 1, 0, share)
        method.create_weights(self, (out_features, share.room), [place], dtype)
        self.bias = _whole_bias(name, out_features, dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.width == 1 or not self.reduce_results:
            return self.stored.apply(x, self.bias if self.rank == 0 else None)
        partial = self.stored.apply(x, None)
        if self.axis == "tp":
            out = tensor_model_parallel_all_reduce(partial)
        else:
            out = attention_tensor_parallel_all_reduce(partial)
        return out if self.bias is None else out + self.bias


class ReplicatedLinear(nn.Module):
    """x [rows, in] -> [rows, out]; every rank holds the whole weight, and nothing is exchanged."""

    weight: LoadableParameter
    stored: StoredWeight

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        method: LinearMethod,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        super().__init__()
        shape = (out_features, in_features)
        method.create_weights(self, shape, [Place.full(f"{name}.weight", shape)], dtype)
        self.bias = _whole_bias(name, out_features, dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stored.apply(x, self.bias)


def _whole_bias(name: str, out_features: int, dtype: torch.dtype) -> LoadableParameter:
    """A bias that every rank holds whole."""
    return LoadableParameter(
        torch.empty(out_features, dtype=dtype), [Place.full(f"{name}.bias", (out_features,))]
    )

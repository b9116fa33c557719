"""Owns the tensor collectives of accelerator groups: the backend's own, through `torch.distributed`.

Read by `GroupCoordinator` for tensors that do not live on the CPU. Must not move a tensor between devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed

__all__ = ["TorchDist"]

_OPS = {
    "sum": torch.distributed.ReduceOp.SUM,
    "max": torch.distributed.ReduceOp.MAX,
    "min": torch.distributed.ReduceOp.MIN,
}


class TorchDist:
    """Collectives of one group. Rows are dim 0; `sizes` lists the rows of each rank in rank order."""

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._world_size = world_size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        tensor = tensor.contiguous()
        torch.distributed.all_reduce(tensor, op=_OPS[op], group=self._group)
        return tensor

    def all_gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        rows = rows.contiguous()
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        if len(set(sizes)) == 1:
            torch.distributed.all_gather_single(out, rows, group=self._group)
        else:
            torch.distributed.all_gather(list(torch.split(out, list(sizes))), rows, group=self._group)
        return out

    def reduce_scatter(self, rows: torch.Tensor, sizes: Sequence[int], op: str) -> torch.Tensor:
        rows = rows.contiguous()
        out = rows.new_empty(sizes[self._rank], *rows.shape[1:])
        if len(set(sizes)) == 1:
            torch.distributed.reduce_scatter_single(out, rows, op=_OPS[op], group=self._group)
        else:
            parts = list(torch.split(rows, list(sizes)))
            torch.distributed.reduce_scatter(out, parts, op=_OPS[op], group=self._group)
        return out

    def all_to_all(
        self, rows: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> torch.Tensor:
        out = rows.new_empty(sum(out_sizes), *rows.shape[1:])
        torch.distributed.all_to_all_single(
            out, rows.contiguous(), list(out_sizes), list(in_sizes), group=self._group
        )
        return out

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, group_src=src, group=self._group)
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        torch.distributed.send(tensor.contiguous(), group_dst=dst, group=self._group)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        torch.distributed.recv(tensor, group_src=src, group=self._group)
        return tensor

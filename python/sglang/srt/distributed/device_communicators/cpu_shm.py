"""Owns the tensor collectives of CPU groups whose ranks share a host: over memory that all have mapped.

Read by `GroupCoordinator`. Gives the bits of `GlooExchange`: pieces are reduced in rank order. What two ranks
send each other, all-to-all and reductions of odd dtypes still go over gloo. Must not decide whether memory is
shared: `shared_memory` does, with all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange

__all__ = ["CpuShm"]


class CpuShm:
    """Collectives of one group. Rows are dim 0; `sizes` lists the rows of each rank in rank order."""

    def __init__(self, shared: Any, reduced_dtypes: frozenset[torch.dtype], gloo: GlooExchange) -> None:
        """`shared` is this rank's `sgl_kernel.shm.ShmGroup`, which reduces `reduced_dtypes`."""
        self._shared = shared
        self._reduced_dtypes = reduced_dtypes
        self._gloo = gloo
        self.send, self.recv, self.all_to_all = gloo.send, gloo.recv, gloo.all_to_all

    def close(self) -> None:
        """Leave: peers that still wait for this rank get an error."""
        self._shared.close()

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if tensor.dtype not in self._reduced_dtypes:
            return self._gloo.all_reduce(tensor, op)
        tensor = tensor.contiguous()
        reduced: torch.Tensor = self._shared.all_reduce(tensor, torch.empty_like(tensor), op)
        return reduced

    def all_gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        gathered: torch.Tensor = self._shared.all_gather(rows.contiguous(), sizes)
        return gathered

    def reduce_scatter(self, rows: torch.Tensor, sizes: Sequence[int], op: str) -> torch.Tensor:
        if rows.dtype not in self._reduced_dtypes:
            return self._gloo.reduce_scatter(rows, sizes, op)
        reduced: torch.Tensor = self._shared.reduce_scatter(rows.contiguous(), sizes, op)
        return reduced

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._shared.broadcast(tensor, src)
        return tensor

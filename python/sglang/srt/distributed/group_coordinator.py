"""Owns one process group as seen by one rank: its ranks, this rank's seat, its two communicators.

Built by ``parallel_state`` and read through ``get_parallel().<name>_group``. Must not know which kind of
parallelism it serves and must not read the context. A collective over one rank is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

__all__ = ["GroupCoordinator"]


class GroupCoordinator:
    """The group of this rank out of a partition of the world.

    ``world_size`` and ``rank_in_group`` are plain attributes; ``ranks`` lists world ranks in group order.
    ``device_group`` runs on the accelerator's backend, ``cpu_group`` is always gloo (control plane).
    """

    world_size: int
    rank_in_group: int
    ranks: list[int]
    local_rank: int
    device_group: Any
    cpu_group: Any
    group_name: str

    def __init__(
        self, group_ranks: Sequence[Sequence[int]], local_rank: int, backend: str, *, group_name: str
    ) -> None:
        rank = torch.distributed.get_rank()
        mine = [list(ranks) for ranks in group_ranks if rank in ranks]
        if len(mine) != 1:
            raise ValueError(
                f"group '{group_name}' must hold rank {rank} exactly once, "
                f"found it in {len(mine)} of {list(group_ranks)}"
            )
        self.group_name = group_name
        self.local_rank = local_rank
        self.ranks = mine[0]
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.device_group = None
        self.cpu_group = None
        # Every rank of the world takes part in making every group, also those it is not a member of.
        for ranks in group_ranks:
            device_group = torch.distributed.new_group(list(ranks), backend=backend)
            cpu_group = torch.distributed.new_group(list(ranks), backend="gloo")
            if rank in ranks:
                self.device_group, self.cpu_group = device_group, cpu_group

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.group_name}, ranks={self.ranks}, rank_in_group={self.rank_in_group})"

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def destroy(self) -> None:
        """Give both communicators back. The coordinator is of no use afterwards; a second call does
        nothing."""
        for name in ("device_group", "cpu_group"):
            group = getattr(self, name, None)
            if group is not None and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group(group)
            setattr(self, name, None)

    # -- collectives: width 1 is the identity -------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group."""
        if self.world_size == 1:
            return tensor
        raise self._not_yet("all_reduce")

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the members' tensors along ``dim`` in group order."""
        if self.world_size == 1:
            return tensor
        raise self._not_yet("all_gather")

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Sum over the group, keep this rank's slice of ``dim``."""
        if self.world_size == 1:
            return tensor
        raise self._not_yet("reduce_scatter")

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of group rank ``src``, on every rank."""
        if self.world_size == 1:
            return tensor
        raise self._not_yet("broadcast")

    def barrier(self) -> None:
        """Wait until every member came here."""
        if self.world_size > 1:
            raise self._not_yet("barrier")

    def _not_yet(self, collective: str) -> NotImplementedError:
        return NotImplementedError(
            f"{collective} over {self.world_size} ranks (group '{self.group_name}') arrives with the "
            "parallel layouts; serve with one rank until then"
        )

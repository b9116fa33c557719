"""Owns a barrier with its own time limit, after whose failure every rank can name the ranks that are missing.

Built by `communicators`, read by `GroupCoordinator`. torch's monitored barrier applies its limit on the first
rank only, and reports the missing ranks there only. Must not be used in a step: it costs a store write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed

__all__ = ["MarkedBarrier"]

#: Keeps the messages of a barrier apart from what ranks send each other.
_TAG = 1


class MarkedBarrier:
    """The numbered barriers of one communicator; all members pass the same ones in the same order."""

    def __init__(self, group: torch.distributed.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._passed = 0
        self._store: torch.distributed.Store | None = None

    def wait(self, timeout_s: float) -> None:
        """Return when every member called; the transport's `RuntimeError` when one left or came too late.

        All report to the first rank, which then releases all of them.
        """
        if self._store is None:
            # The group's own store would do, but torch hands out only the world's.
            self._store = torch.distributed.distributed_c10d._get_default_store()
        self._passed += 1
        # Written before waiting, so that every rank can see afterwards who was here.
        self._store.set(self._mark(self._rank), "here")
        deadline = time.monotonic() + timeout_s
        first, *others = range(len(self._ranks))
        if self._ranks[first] == self._rank:
            self._until(deadline, [self._recv(other) for other in others])
            self._until(deadline, [self._send(other) for other in others])
        else:
            self._until(deadline, [self._send(first)])
            self._until(deadline, [self._recv(first)])

    def _until(self, deadline: float, transfers: Sequence[torch.distributed.Work | None]) -> None:
        for transfer in transfers:
            assert transfer is not None, "only a rank outside the group gets None"
            # Never zero, which would mean the limit of the group.
            transfer.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def _send(self, peer: int) -> torch.distributed.Work | None:
        message = torch.zeros(1, dtype=torch.uint8)
        return torch.distributed.isend(message, group_dst=peer, group=self._group, tag=_TAG)

    def _recv(self, peer: int) -> torch.distributed.Work | None:
        message = torch.zeros(1, dtype=torch.uint8)
        return torch.distributed.irecv(message, group_src=peer, group=self._group, tag=_TAG)

    def missing(self) -> str:
        """Who is missing at the last barrier; `RuntimeError` when the store went down with its rank."""
        store = self._store
        absent = [rank for rank in self._ranks if store is None or not store.check([self._mark(rank)])]
        return f"world ranks {absent} did not come" if absent else "all came, but one left before the end"

    def _mark(self, rank: int) -> str:
        # torch never reuses the name of a group, so the marks of an earlier one are not found.
        return f"barrier/{self._group.group_name}/{self._passed}/{rank}"

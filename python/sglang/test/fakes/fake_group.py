"""Owns a group of ranks of which only one exists: what the others send is given beforehand.

Read by tests of code that talks to other ranks and can be tested in one process. It must not start a process;
what it carries goes through msgpack, as between real ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

Row = list[int]


class FakeGroup:
    """`said` holds what this rank broadcast, `heard` what it will receive (such as another rank's `said`).

    `everyone(mine)` gives the rows of all ranks for a gather; without it all send what this rank sends.
    """

    def __init__(
        self,
        world_size: int,
        rank: int = 0,
        *,
        heard: Iterable[Any] = (),
        everyone: Callable[[Row], list[Row]] | None = None,
    ) -> None:
        self.world_size = world_size
        self.rank_in_group = rank
        self.ranks = list(range(world_size))
        self.heard = deque(heard)
        self.said: list[Any] = []
        self.calls: Counter[str] = Counter()
        self.everyone = everyone

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        self.calls["broadcast_object"] += 1
        if self.rank_in_group != src:
            return self.heard.popleft()
        self.said.append(msgspec.msgpack.decode(msgspec.msgpack.encode(value)))
        return value

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self.calls["all_gather"] += 1
        assert dim == 0 and tensor.shape[0] == 1, "one row a rank"
        mine: Row = tensor[0].tolist()
        rows = [mine] * self.world_size if self.everyone is None else self.everyone(mine)
        assert len(rows) == self.world_size and rows[self.rank_in_group] == mine
        return torch.tensor(rows, dtype=tensor.dtype)

    def all_gather_object(self, value: Any) -> list[Any]:
        self.calls["all_gather_object"] += 1
        return [value] * self.world_size

    def barrier(self, timeout_s: float | None = None) -> None:
        self.calls["barrier"] += 1

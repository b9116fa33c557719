"""Owns which cached leaf goes first when room is needed, as an order on nodes.

Read by the radix tree only. It must not look at a clock: uses are counted, so that a run can be repeated
exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class Evictable(Protocol):
    """What an order may look at."""

    last_use: int
    uses: int


class EvictPolicy(ABC):
    """Smallest priority leaves first.

    A priority may only grow while a node lives: the tree's heap relies on it.
    """

    @abstractmethod
    def priority(self, node: Evictable) -> tuple[int, ...]: ...


class LRU(EvictPolicy):
    """Least recently used first."""

    def priority(self, node: Evictable) -> tuple[int, ...]:
        return (node.last_use,)


_POLICIES: dict[str, type[EvictPolicy]] = {"lru": LRU}


def make_evict_policy(name: str) -> EvictPolicy:
    """The order with this name (`--radix-eviction-policy`)."""
    if name not in _POLICIES:
        raise ValueError(f"radix_eviction_policy: must be one of {', '.join(_POLICIES)}, got {name!r}")
    return _POLICIES[name]()

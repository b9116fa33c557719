"""Owns which cached leaf goes first when room is needed, as an order on nodes.

Read by the radix tree only. It must not look at a clock: uses are counted, so that a run can be repeated
exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Evictable(Protocol):
    """What an order may look at."""

    last_use: int


#: The priority of a node; the smallest goes first. It may only grow while the node lives: the tree's heap
#: relies on it.
EvictPolicy = Callable[[Evictable], tuple[int, ...]]

_POLICIES: dict[str, EvictPolicy] = {"lru": lambda node: (node.last_use,)}


def make_evict_policy(name: str) -> EvictPolicy:
    """The order with this name (`--radix-eviction-policy`)."""
    if name not in _POLICIES:
        raise ValueError(f"radix_eviction_policy: must be one of {', '.join(_POLICIES)}, got {name!r}")
    return _POLICIES[name]

"""Owns the contract of a prefix cache: token ids in, slots out, and locks on what is in use.

Read by `request_kv.py` and the scheduler's counters. It must not know requests, pools or policies of the
scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


class CacheNode:
    """A handle on a cached prefix, opaque to everybody but the cache that made it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: its slots (a copy) and the handle to lock while they are in use."""

    slots: np.ndarray
    node: CacheNode | None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of an insertion.

    The first `existing` tokens were cached before, with slots of their own; `node` covers all of them.
    """

    existing: int
    node: CacheNode | None


def common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


class BasePrefixCache(ABC):
    """Slots by token ids, in whole pages, apart for each `extra_key`.

    Sizes are tokens. A cached token is either protected (some request holds a lock above or on its node) or
    evictable.
    """

    page_size: int
    #: False for the cache that remembers nothing, so that callers can spare themselves the work.
    keeps: bool

    @abstractmethod
    def match_prefix(self, extra_key: str | None, token_ids: np.ndarray) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, a multiple of the page size; counts as a use of it."""

    @abstractmethod
    def insert(self, extra_key: str | None, token_ids: np.ndarray, slots: np.ndarray) -> InsertResult:
        """Remember whole pages of tokens.

        The cache owns `slots[existing:]` from now on, the caller keeps the rest.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> np.ndarray:
        """Forget at least `num_tokens` unlocked tokens, or all there are; returns the slots freed."""

    @abstractmethod
    def lock(self, node: CacheNode | None) -> None:
        """Protect everything from the root to `node`; locks count."""

    @abstractmethod
    def unlock(self, node: CacheNode | None) -> None:
        """Undo one `lock`."""

    @abstractmethod
    def clear(self) -> np.ndarray:
        """Forget everything (nothing may be locked); returns the slots freed."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens that `evict` could free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens under a lock."""

    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size() + self.protected_size()

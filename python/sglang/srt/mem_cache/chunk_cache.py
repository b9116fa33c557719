"""Owns the prefix cache that caches nothing: every request computes its whole prompt.

Chosen in place of the radix tree by `--disable-radix-cache`; the rest of the engine cannot tell the
difference.
"""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheNode, InsertResult, PrefixMatch

_NOTHING = np.zeros(0, dtype=np.int64)


class ChunkCache(BasePrefixCache):
    """Matches nothing and keeps nothing: `insert` leaves every slot with the caller."""

    keeps = False

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match_prefix(self, extra_key: str | None, token_ids: np.ndarray) -> PrefixMatch:
        return PrefixMatch(_NOTHING, None)

    def insert(self, extra_key: str | None, token_ids: np.ndarray, slots: np.ndarray) -> InsertResult:
        return InsertResult(0, None)

    def evict(self, num_tokens: int) -> np.ndarray:
        return _NOTHING

    def lock(self, node: CacheNode | None) -> None:
        return None

    def unlock(self, node: CacheNode | None) -> None:
        return None

    def clear(self) -> np.ndarray:
        return _NOTHING

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

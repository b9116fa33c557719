"""Owns allocation with pages of one token: a slot is a page.

Chosen by `make_slot_allocator` for page size 1. It must not know requests.
"""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.allocator.base import SlotAllocator


class TokenSlotAllocator(SlotAllocator):
    """Every token has a page of its own, so any slot can be shared and freed alone."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 1)

    def pages_to_extend(self, start: int, end: int) -> int:
        return end - start

    def pages_to_decode(self, positions: np.ndarray) -> int:
        return len(positions)

    def alloc_extend(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        return self._pages.take(end - start, together=True)

    def alloc_decode(
        self, positions: np.ndarray, lengths: np.ndarray, last_slots: np.ndarray
    ) -> np.ndarray | None:
        return self._pages.take(len(positions), together=False)

    def free(self, slots: np.ndarray) -> None:
        self._pages.give_back(slots)

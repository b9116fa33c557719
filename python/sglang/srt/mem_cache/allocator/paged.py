"""Owns allocation with pages of several tokens: a request fills its last page before it gets a new one.

Chosen by `make_slot_allocator` for page sizes above 1. It must not know requests: the caller says where the
last token lies.
"""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.allocator.base import SlotAllocator


class PagedSlotAllocator(SlotAllocator):
    """Token t of a request lies at offset `t % page_size` of its page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._offsets: np.ndarray = np.arange(page_size, dtype=np.int64)

    def pages_to_extend(self, start: int, end: int) -> int:
        return -(-end // self.page_size) - -(-start // self.page_size)

    def pages_to_decode(self, positions: np.ndarray) -> int:
        return int(np.count_nonzero(positions % self.page_size == 0))

    def alloc_extend(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        pages = self._pages.take(self.pages_to_extend(start, end), together=True)
        if pages is None:
            return None
        fresh: np.ndarray = (pages[:, None] * self.page_size + self._offsets).reshape(-1)
        room = -start % self.page_size  # slots left in the page that the request already holds
        if room:
            fresh = np.concatenate((np.arange(last_slot + 1, last_slot + 1 + room, dtype=np.int64), fresh))
        return fresh[: end - start]

    def alloc_decode(
        self, positions: np.ndarray, lengths: np.ndarray, last_slots: np.ndarray
    ) -> np.ndarray | None:
        offsets = positions % self.page_size
        starts_page = offsets == 0
        pages = self._pages.take(int(np.count_nonzero(starts_page)), together=False)
        if pages is None:
            return None
        slots: np.ndarray = last_slots + 1 + positions - lengths  # right in the page that is held already
        if len(pages):
            taken = positions - offsets >= lengths
            slots[taken] = pages[np.cumsum(starts_page)[taken] - 1] * self.page_size + offsets[taken]
        return slots

    def free(self, slots: np.ndarray) -> None:
        if len(slots):
            self._pages.give_back(np.unique(slots // self.page_size))

"""Owns the free pages and the contract of an allocator: int64 slots or None, and whole pages given back.

Read by the request side of the cache; the two page-size cases are in `token.py` and `paged.py`. It must not
evict, retract or wait: it only says that there is no room.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

#: Page 0 belongs to no request: padding rows write there, and unwritten entries of the table point there.
RESERVED_PAGES = 1


class FreePages:
    """The set of free pages.

    Pages of one request are neighbours where possible; single ones are taken from the far end. `_sorted` is
    ascending; `_returned` holds pages given back since it was last sorted. Pages may also be claimed by
    number; `_sorted` is then made anew before it is used.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._sorted: np.ndarray = np.arange(RESERVED_PAGES, self.num_pages + RESERVED_PAGES, dtype=np.int64)
        self._returned: list[np.ndarray] = []
        self._num_free = self.num_pages
        self._claimed = False  # pages that `_sorted` still lists
        self._held: np.ndarray = np.zeros(self.num_pages + RESERVED_PAGES, dtype=np.bool_)

    def __len__(self) -> int:
        return self._num_free

    def take(self, count: int, *, together: bool) -> np.ndarray | None:
        """`count` pages in ascending order, or None if there are fewer.

        `together`: one request gets them all.
        """
        if count > self._num_free:
            return None
        if self._claimed:
            self._sort()
        if together and count > 1:
            pages = self._take_run(count)
        else:
            if len(self._sorted) < count:
                self._sort()
            split = len(self._sorted) - count
            pages = self._sorted[split:]
            self._sorted = self._sorted[:split]
        self._held[pages] = True
        self._num_free -= count
        return pages

    def are_free(self, pages: np.ndarray) -> np.ndarray:
        """Whether each of `pages` is free, bool; numbers outside of the pool are not."""
        inside = (pages >= RESERVED_PAGES) & (pages < len(self._held))
        held: np.ndarray = self._held[np.where(inside, pages, 0)]
        free: np.ndarray = np.logical_and(inside, np.logical_not(held))
        return free

    def free_blocks(self, block: int, first: int = 0, end: int | None = None) -> np.ndarray:
        """Numbers of the blocks of `block` pages, of those from `first` up to `end`, that are wholly free."""
        pages = self._held[first * block : None if end is None else end * block]
        held: np.ndarray = np.logical_or.reduce(
            pages[: len(pages) // block * block].reshape(-1, block), axis=1
        )
        if first == 0 and len(held):
            held[0] = True  # the reserved page is in it
        return np.flatnonzero(~held) + first

    def any_free(self) -> int:
        """The highest free page; there must be one."""
        if self._claimed or not len(self._sorted):
            self._sort()
        return int(self._sorted[-1])

    def claim(self, pages: np.ndarray) -> None:
        """Take these free pages, each named once."""
        self._held[pages] = True
        self._num_free -= len(pages)
        self._claimed = True

    def give_back(self, pages: np.ndarray) -> None:
        if len(pages) == 0:
            return
        if not self._held[pages].all():
            wrong = pages[~self._held[pages]]
            raise RuntimeError(f"pages {wrong[:8].tolist()} were freed but nobody holds them")
        self._held[pages] = False
        if int(np.count_nonzero(self._held)) != self.num_pages - self._num_free - len(pages):
            raise RuntimeError(f"a page occurs twice in one free: {np.sort(pages)[:8].tolist()}")
        self._returned.append(pages.copy())  # the caller may hand over a view of its table
        self._num_free += len(pages)

    def _take_run(self, count: int) -> np.ndarray:
        start = self._find_run(count)
        if start is None and self._returned:
            self._sort()
            start = self._find_run(count)
        if start is None:
            start = 0  # no run is long enough: the lowest pages
        free = self._sorted
        pages = free[start : start + count]
        rest = free[start + count :]
        self._sorted = rest if start == 0 else np.concatenate((free[:start], rest))
        return pages

    def _find_run(self, count: int) -> int | None:
        """Index into `_sorted` of the first `count` neighbours."""
        free = self._sorted
        if len(free) < count:
            return None
        if free[count - 1] - free[0] == count - 1:
            return 0
        is_run = free[count - 1 :] - free[: len(free) - count + 1] == count - 1
        start = int(is_run.argmax())
        return start if is_run[start] else None

    def _sort(self) -> None:
        if self._returned or self._claimed:
            self._sorted = np.flatnonzero(~self._held[RESERVED_PAGES:]) + RESERVED_PAGES
            self._returned, self._claimed = [], False


class SlotAllocator(ABC):
    """Hands out slots of the KV pool.

    All lengths are tokens; `size` and `available_size` count the tokens of whole pages.
    """

    page_size: int
    #: Attention reads slots fastest in runs that begin at multiples of it; a request takes them run by run.
    run_size: int

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"an allocator needs num_pages >= 1 and page_size >= 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = self.run_size = page_size
        self._pages = FreePages(num_pages)

    @property
    def size(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.num_pages * self.page_size

    def available_size(self) -> int:
        """Tokens that fit into the pages that are free now."""
        return len(self._pages) * self.page_size

    @abstractmethod
    def pages_to_extend(self, start: int, end: int) -> int:
        """New pages needed when a request that has slots for `start` tokens gets slots up to `end`."""

    @abstractmethod
    def pages_to_decode(self, positions: np.ndarray) -> int:
        """New pages needed for slots at `positions`, those of each request going on where its slots end."""

    @abstractmethod
    def alloc_extend(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        """Slots for the tokens `start .. end - 1` of one request; token `start - 1` lies in `last_slot`."""

    @abstractmethod
    def alloc_decode(
        self, positions: np.ndarray, lengths: np.ndarray, last_slots: np.ndarray
    ) -> np.ndarray | None:
        """A slot for each of `positions`, which list those of one request after those of another.

        The request of position i has slots for `lengths[i]` tokens, the last in `last_slots[i]`; its
        positions go on from there.
        """

    @abstractmethod
    def free(self, slots: np.ndarray) -> None:
        """Give pages back that nobody uses any more, each named by at least one of its slots."""

"""Owns allocation with pages of one token: a slot is a page, and a request gets blocks of neighbours.

Chosen by `make_slot_allocator` for page size 1. Any slot can be shared and freed alone; but attention reads
slots fastest where token t of a request lies at `t % BLOCK` of a block of neighbours, so that is what it gets
while there are blocks. It must not know requests.
"""

from __future__ import annotations

import logging

import numpy as np

from sglang.srt.mem_cache.allocator.base import SlotAllocator

logger = logging.getLogger(__name__)

#: Slots of a block: what a register of the kernels takes together (`sgl_kernel.attention.KV_BLOCK_SLOTS`).
BLOCK = 16
#: Blocks that are looked through at once for a free one.
_WINDOW = 64


class TokenSlotAllocator(SlotAllocator):
    """Every token has a page of its own; what is left of a block is handed out to others last of all.

    Prompts get blocks from the low end, decode steps from the far one.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 1)
        self.run_size = BLOCK
        self._num_blocks = (num_slots + 1) // BLOCK
        self._cursor = self._num_blocks  # blocks from here on were looked through last
        self._no_block = False  # since pages were given back last
        self._said_scattered = False

    def pages_to_extend(self, start: int, end: int) -> int:
        return end - start

    def pages_to_decode(self, positions: np.ndarray) -> int:
        return len(positions)

    def alloc_extend(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        if end - start > len(self._pages):
            return None
        more = self._rest_of_block(start, end, last_slot) if start else np.empty(0, dtype=np.int64)
        self._pages.claim(more)
        start += len(more)
        if start == end:
            return more
        run = self._blocks_for(start, end, int(more[-1]) if len(more) else last_slot)
        if run is None:
            self._say_scattered()
            run = self._pages.take(end - start, together=True)
            assert run is not None
        else:
            self._pages.claim(run)
        return np.concatenate((more, run))

    def alloc_decode(
        self, positions: np.ndarray, lengths: np.ndarray, last_slots: np.ndarray
    ) -> np.ndarray | None:
        if len(positions) > len(self._pages):
            return None
        slots: np.ndarray = last_slots + 1 + positions - lengths
        goes_on = slots // BLOCK == last_slots // BLOCK
        goes_on &= (slots - positions) % BLOCK == 0
        goes_on &= self._pages.are_free(slots)
        if goes_on.all() and len(set(slots.tolist())) == len(slots):
            self._pages.claim(slots)
            return slots
        last = position = -1
        i = 0
        while i < len(slots):
            follows = i > 0 and lengths[i] == lengths[i - 1] and positions[i] == position + 1
            if goes_on[i] and self._pages.are_free(slots[i : i + 1])[0]:  # may be another's by now
                count = 1
            elif follows and positions[i] % BLOCK and self._goes_behind(last, int(positions[i])):
                slots[i], count = last + 1, 1
            else:
                slots[i], is_whole = self._slot_of_new_block(int(positions[i]))
                count = self._run_in_block(positions[i:], lengths[i:]) if is_whole else 1
                slots[i : i + count] = np.arange(slots[i], slots[i] + count)
            self._pages.claim(slots[i : i + count])
            i += count
            last, position = int(slots[i - 1]), int(positions[i - 1])
        return slots

    def free(self, slots: np.ndarray) -> None:
        self._pages.give_back(slots)
        self._no_block = False

    @staticmethod
    def _run_in_block(positions: np.ndarray, lengths: np.ndarray) -> int:
        """How many of these tokens, from the first on, follow one another in one request and one block."""
        most = min(BLOCK - int(positions[0]) % BLOCK, len(positions))
        is_next = (positions[:most] == positions[0] + np.arange(most)) & (lengths[:most] == lengths[0])
        return most if is_next.all() else int(is_next.argmin())

    def _goes_behind(self, last: int, position: int) -> bool:
        return (last + 1 - position) % BLOCK == 0 and bool(self._pages.are_free(np.array([last + 1]))[0])

    def _rest_of_block(self, start: int, end: int, last_slot: int) -> np.ndarray:
        """Free slots right behind `last_slot`, for tokens from `start` on, up to the end of its block."""
        if start % BLOCK == 0 or (last_slot + 1 - start) % BLOCK:
            return np.empty(0, dtype=np.int64)
        wanted = last_slot + 1 + np.arange(min(-start % BLOCK, end - start), dtype=np.int64)
        free = self._pages.are_free(wanted)
        return wanted if free.all() else wanted[: int(free.argmin())]

    def _blocks_for(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        """Slots of free blocks for tokens `start` to `end`, behind `last_slot` or together if possible."""
        offset = start % BLOCK
        count = -(-(offset + end - start) // BLOCK)
        blocks = self._pages.free_blocks(BLOCK)
        if len(blocks) < count:
            return None
        first = 0
        behind = int(np.searchsorted(blocks, (last_slot + 1) // BLOCK))
        if start and behind + count <= len(blocks) and blocks[behind] * BLOCK == last_slot + 1 - offset:
            is_run = blocks[behind + count - 1] - blocks[behind] == count - 1
            first = behind if is_run else 0
        if first == 0:
            runs = blocks[count - 1 :] - blocks[: len(blocks) - count + 1] == count - 1
            first = int(runs.argmax())  # where no run is long enough, the lowest blocks
        slots: np.ndarray = blocks[first : first + count, None] * BLOCK + np.arange(BLOCK)
        return slots.reshape(-1)[offset : offset + end - start]

    def _slot_of_new_block(self, position: int) -> tuple[int, bool]:
        """The slot for a token at `position` in a free block, and True; any free slot where there is none."""
        for _ in range(0 if self._no_block else self._num_blocks // _WINDOW + 2):
            first = max(self._cursor - _WINDOW, 0)
            blocks = self._pages.free_blocks(BLOCK, first, self._cursor)
            if len(blocks):
                self._cursor = int(blocks[-1]) + 1
                return int(blocks[-1]) * BLOCK + position % BLOCK, True
            self._cursor = first or self._num_blocks
        self._no_block = True
        self._say_scattered()
        return self._pages.any_free(), False

    def _say_scattered(self) -> None:
        if not self._said_scattered:
            self._said_scattered = True
            logger.warning(
                "Slots lie singly from now on, and attention reads them slower: %d of %d are free, and not "
                "enough blocks of %d neighbours among them. A larger pool (--mem-fraction-static, "
                "--max-total-tokens) or fewer requests at once (--max-running-requests) would help.",
                len(self._pages),
                self.size,
                BLOCK,
            )

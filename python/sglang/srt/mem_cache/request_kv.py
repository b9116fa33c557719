"""Owns the cache side of requests: which slots a request takes, shares, keeps for others and gives back.

Used by the planner and the result processor. It must not choose who gets room: it evicts what nobody uses,
or says that there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang.srt.batch.req import Req
from sglang.srt.mem_cache.allocator import SlotAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, PrefixMatch
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool


class RequestKV:
    """Rows of the request table, slots and cached prefixes of all requests.

    A call that finds no room changes nothing.
    """

    def __init__(
        self, req_to_token_pool: ReqToTokenPool, allocator: SlotAllocator, prefix_cache: BasePrefixCache
    ) -> None:
        if allocator.page_size != prefix_cache.page_size:
            raise ValueError(
                f"the allocator has pages of {allocator.page_size} tokens, "
                f"the prefix cache of {prefix_cache.page_size}"
            )
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.page_size = allocator.page_size

    @property
    def size(self) -> int:
        """Tokens of the whole pool."""
        return self.allocator.size

    def room(self) -> int:
        """Tokens that could be allocated now: free pages and cached pages that nobody uses."""
        return self.allocator.available_size() + self.prefix_cache.evictable_size()

    def whole_pages(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole pages, in tokens."""
        return -(-num_tokens // self.page_size) * self.page_size

    def owned(self, req: Req) -> int:
        """Tokens of the pages that this request alone holds, used or reserved."""
        return self.whole_pages(req.reserved_len) - req.shared_len

    def used(self) -> int:
        """Tokens of pages that are neither free nor evictable."""
        return self.size - self.room()

    def match(self, req: Req) -> PrefixMatch:
        """The cached prefix that this request may reuse."""
        return self.prefix_cache.match_prefix(req.extra_key, req.token_ids()[: req.reuse_limit])

    def begin(self, req: Req, match: PrefixMatch) -> None:
        """Give the request a row that starts with its cached prefix, which is locked from now on."""
        req_pool_idx = self.req_to_token_pool.alloc()
        if req_pool_idx is None:
            raise RuntimeError(
                f"all {self.req_to_token_pool.size} rows of the request table are taken: "
                "admit fewer requests first"
            )
        self.prefix_cache.lock(match.node)
        self.req_to_token_pool.write(req_pool_idx, 0, match.slots)
        req.req_pool_idx = req_pool_idx
        req.node = match.node
        req.shared_len = req.kv_len = req.reserved_len = len(match)

    def extend(self, req: Req, end: int) -> np.ndarray | None:
        """Slots for the tokens of a prompt from `kv_len` up to `end`; None when there is no room."""
        start = req.kv_len
        assert start == req.reserved_len, "a prompt has no slots in reserve"
        if not self._make_room(self.allocator.pages_to_extend(start, end)):
            return None
        last_slot = int(self.req_to_token_pool.host[req.req_pool_idx, start - 1]) if start else 0
        slots = self.allocator.alloc_extend(start, end, last_slot)
        assert slots is not None and req.req_pool_idx is not None
        self.req_to_token_pool.write(req.req_pool_idx, start, slots)
        req.kv_len = req.reserved_len = end
        return slots

    def reserve(
        self, reqs: Sequence[Req], req_pool_indices: np.ndarray, lengths: np.ndarray, count: int
    ) -> np.ndarray | None:
        """Slots for the next `count` tokens of each running request; returns the first of each.

        None when there is no room for all. `req_pool_indices[b]` and `lengths[b]` are the row of request b in
        the table and its `kv_len`. What a row has in reserve already counts. While there is plenty of room, a
        request takes slots up to the end of a run: most steps then find all that they need.
        """
        reserved = np.array([req.reserved_len for req in reqs], dtype=np.int64)
        ends = lengths + count
        if (reserved < ends).any() and not self._reserve_up_to(reqs, req_pool_indices, reserved, ends):
            return None
        first: np.ndarray = self.req_to_token_pool.host[req_pool_indices, lengths]
        return first

    def _reserve_up_to(
        self, reqs: Sequence[Req], rows: np.ndarray, reserved: np.ndarray, ends: np.ndarray
    ) -> bool:
        """Slots for tokens `reserved` to `ends` of each request; False, and nothing taken, without room."""
        run = self.allocator.run_size
        if self.allocator.available_size() > self.size // 2 + run * len(reqs):
            ends = np.where(reserved < ends, (ends + run - 1) // run * run, ends)
            ends = np.minimum(ends, self.req_to_token_pool.host.shape[1])
        missing = np.maximum(ends - reserved, 0)
        starts = np.repeat(reserved, missing)
        # Of each request its own 0, 1, ... behind its slots.
        places = np.arange(len(starts)) - np.repeat(np.cumsum(missing) - missing, missing)
        if not self._append(np.repeat(rows, missing), starts + places, starts):
            return False
        for req, added in zip(reqs, missing.tolist()):
            req.reserved_len += added
        return True

    def _append(self, rows: np.ndarray, positions: np.ndarray, lengths: np.ndarray) -> bool:
        """Slots at `positions` of `rows`, which have slots for `lengths` tokens; False without room."""
        if not self._make_room(self.allocator.pages_to_decode(positions)):
            return False
        last_slots = self.req_to_token_pool.host[rows, lengths - 1]
        slots = self.allocator.alloc_decode(positions, lengths, last_slots)
        assert slots is not None
        self.req_to_token_pool.write_many(rows, positions, slots)
        return True

    def commit(self, req: Req) -> None:
        """Hand the whole pages of the request's tokens to the prefix cache, so that others can share them.

        Where the cache has the same tokens under other slots (two requests computed one prefix), the slots of
        the request are freed and it uses those of the cache.
        """
        end = req.kv_len // self.page_size * self.page_size
        if not self.prefix_cache.keeps or end <= req.shared_len:
            return
        assert req.req_pool_idx is not None
        ids = req.token_ids()[:end]
        slots = self.req_to_token_pool.host[req.req_pool_idx, :end]
        inserted = self.prefix_cache.insert(req.extra_key, ids, slots)
        assert inserted.existing >= req.shared_len, "a locked prefix left the cache"
        self.prefix_cache.lock(inserted.node)
        self.prefix_cache.unlock(req.node)
        req.node = inserted.node
        if inserted.existing > req.shared_len:
            duplicates = slots[req.shared_len : inserted.existing].copy()
            cached = self.prefix_cache.match_prefix(req.extra_key, ids[: inserted.existing]).slots
            self.req_to_token_pool.write(req.req_pool_idx, req.shared_len, cached[req.shared_len :])
            self.allocator.free(duplicates)
        req.shared_len = end

    def release(self, req: Req, *, keep: bool) -> None:
        """Take the request's row, slots and lock back.

        `keep` leaves the whole pages that it computed in the prefix cache, where they may be evicted.
        """
        assert req.req_pool_idx is not None
        if keep:
            self.commit(req)
        self.allocator.free(self.req_to_token_pool.host[req.req_pool_idx, req.shared_len : req.reserved_len])
        self.prefix_cache.unlock(req.node)
        self.req_to_token_pool.free(req.req_pool_idx)
        req.req_pool_idx = None
        req.node = None
        req.kv_len = req.shared_len = req.reserved_len = 0

    def flush(self) -> None:
        """Forget the prefix cache; refused while somebody uses a part of it."""
        self.allocator.free(self.prefix_cache.clear())

    def _make_room(self, num_pages: int) -> bool:
        missing = num_pages * self.page_size - self.allocator.available_size()
        if missing > 0:
            if missing > self.prefix_cache.evictable_size():
                return False  # evicting would cost others their prefix and still not help
            self.allocator.free(self.prefix_cache.evict(missing))
        return True

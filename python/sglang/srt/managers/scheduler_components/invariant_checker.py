"""Owns the sums that must hold between steps: every page is free, cached or owned, and nothing stays locked.

Asked by the scheduler when it becomes idle, and by tests after every step. It must not repair anything: a
wrong sum is an error.
"""

from __future__ import annotations

import numpy as np

from sglang.srt.managers.scheduler_components.schedule_batch import RequestQueues
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_kv import RequestKV


class InvariantChecker:
    """Each check raises `RuntimeError` with all numbers of its sum."""

    def __init__(self, queues: RequestQueues, kv: RequestKV) -> None:
        self._queues = queues
        self._kv = kv

    def check_sum(self) -> None:
        """free + cached + owned = pool, in tokens of whole pages."""
        kv = self._kv
        free = kv.allocator.available_size()
        cached = kv.prefix_cache.total_size()
        owned = sum(kv.owned(req) for req in self._queues.started())
        if free + cached + owned != kv.size:
            raise RuntimeError(
                f"the KV pool does not add up: free {free} + cached {cached} + owned {owned} = "
                f"{free + cached + owned}, but the pool has {kv.size} tokens"
            )

    def check_idle(self) -> None:
        """With no request left: the sum holds, no cached token is locked, no row is taken."""
        self.check_sum()
        kv = self._kv
        if kv.prefix_cache.protected_size():
            raise RuntimeError(
                f"no request is left, but {kv.prefix_cache.protected_size()} cached tokens are still locked"
            )
        table = kv.req_to_token_pool
        taken = table.size - table.available_size()
        if taken:
            raise RuntimeError(
                f"no request is left, but {taken} of {table.size} rows of the request table are taken"
            )

    def check_lengths(self) -> None:
        """A running request has every token but its newest in the cache, within the slots of its row."""
        for req in self._queues.running:
            if not req.shared_len <= req.kv_len == req.seq_len - 1 <= req.reserved_len:
                raise RuntimeError(
                    f"request {req.rid!r} has {req.seq_len} tokens, of which {req.kv_len} are counted as "
                    f"cached ({req.shared_len} shared), in {req.reserved_len} slots"
                )

    def check_slots(self) -> None:
        """Every slot is held once and lies in the pool. Visits every slot, so it is for tests."""
        kv, cache = self._kv, self._kv.prefix_cache
        held: list[np.ndarray] = []
        if isinstance(cache, RadixCache):
            nodes = list(cache.nodes())
            held += [node.slots for node in nodes]
            locked = sum(len(node.ids) for node in nodes if node.locks)
            if locked != cache.protected_size() or sum(len(node.ids) for node in nodes) != cache.total_size():
                raise RuntimeError(
                    f"the prefix cache counts {cache.protected_size()} locked tokens, its nodes {locked}"
                )
        for req in self._queues.started():
            assert req.req_pool_idx is not None
            held.append(kv.req_to_token_pool.host[req.req_pool_idx, req.shared_len : req.reserved_len])
            shared = kv.req_to_token_pool.host[req.req_pool_idx, : req.shared_len]
            if cache.keeps and not np.isin(shared, np.concatenate(held[:-1] or [shared[:0]])).all():
                raise RuntimeError(
                    f"request {req.rid!r} reads shared slots that the prefix cache does not hold"
                )
        slots = np.concatenate(held) if held else np.zeros(0, dtype=np.int64)
        if len(np.unique(slots)) != len(slots):
            raise RuntimeError("a slot is held twice")
        if len(slots) and (slots.min() < kv.page_size or slots.max() >= kv.size + kv.page_size):
            raise RuntimeError(f"a slot lies outside the pool: {slots.min()} .. {slots.max()}")

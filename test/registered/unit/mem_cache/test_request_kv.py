"""Slots of requests: reserved ahead, counted in whole pages, kept as far as there are tokens, given back."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.batch.req import Req
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.mem_cache.allocator import make_slot_allocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.test.fakes.scheduler_driver import make_request

PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])


def new_kv(page_size: int, *, pool_tokens: int = 192, cached: bool = True) -> RequestKV:
    cache: BasePrefixCache = RadixCache(page_size) if cached else ChunkCache(page_size)
    return RequestKV(ReqToTokenPool(8, 128), make_slot_allocator(pool_tokens // page_size, page_size), cache)


def started(kv: RequestKV, prompt: Sequence[int]) -> Req:
    """A running request: its prompt is computed and its first token drawn."""
    message = make_request("r", prompt)
    req = Req(message, SamplingState(message.sampling_params, 0, ()), 100, 0)
    kv.begin(req, kv.match(req))
    assert kv.extend(req, len(prompt)) is not None
    kv.commit(req)
    req.output_ids.append(7)
    return req


def reserve(kv: RequestKV, reqs: Sequence[Req], count: int) -> list[int] | None:
    rows = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
    lengths = np.array([req.kv_len for req in reqs], dtype=np.int64)
    slots = kv.reserve(reqs, rows, lengths, count)
    return None if slots is None else slots.tolist()


def draw(req: Req, count: int) -> None:
    req.output_ids += [8] * count
    req.kv_len += count


def row(kv: RequestKV, req: Req) -> list[int]:
    slots: list[int] = kv.req_to_token_pool.host[req.req_pool_idx, : req.reserved_len].tolist()
    return slots


def assert_sound(kv: RequestKV, reqs: Sequence[Req]) -> None:
    """Pages are filled in order and held once, and those of all requests and the cache make up the pool."""
    owned = sum(kv.owned(req) for req in reqs)
    assert kv.allocator.available_size() + kv.prefix_cache.total_size() + owned == kv.size
    own_pages: list[int] = []
    for req in reqs:
        slots = row(kv, req)
        assert [slot % kv.page_size for slot in slots] == [i % kv.page_size for i in range(len(slots))]
        assert min(slots) >= kv.page_size and len(set(slots)) == len(slots)
        own_pages += {slot // kv.page_size for slot in slots[req.shared_len :]}
    assert len(own_pages) == len(set(own_pages)) == owned // kv.page_size


@PAGES
def test_a_reserve_gives_every_request_its_slots_and_counts_what_is_there(page_size: int) -> None:
    kv = new_kv(page_size, pool_tokens=80)
    reqs = [started(kv, range(100, 110)), started(kv, range(200, 207)), started(kv, range(300, 316))]
    assert reserve(kv, reqs, 5) == [row(kv, req)[req.kv_len] for req in reqs]
    assert [req.reserved_len for req in reqs] == [15, 12, 21]
    assert [req.kv_len for req in reqs] == [10, 7, 16], "slots in reserve hold no tokens"
    assert_sound(kv, reqs)
    before = [row(kv, req) for req in reqs]
    for req, count in zip(reqs, (1, 5, 3)):
        draw(req, count)
    assert reserve(kv, reqs, 5) == [row(kv, req)[req.kv_len] for req in reqs]
    assert [req.reserved_len for req in reqs] == [16, 17, 24]
    assert [row(kv, req)[: len(had)] for req, had in zip(reqs, before)] == before, "no slot moves"
    assert_sound(kv, reqs)


@PAGES
def test_with_plenty_of_room_a_reserve_goes_to_the_end_of_a_run_and_is_not_asked_for_again(
    page_size: int,
) -> None:
    kv = new_kv(page_size, pool_tokens=256)
    reqs = [started(kv, range(100, 110)), started(kv, range(200, 207)), started(kv, range(300, 316))]
    assert reserve(kv, reqs, 1) == [row(kv, req)[req.kv_len] for req in reqs]
    run = kv.allocator.run_size
    assert [req.reserved_len for req in reqs] == [-(-length // run) * run for length in (11, 8, 17)]
    assert_sound(kv, reqs)
    draw(reqs[2], 1)
    free = kv.allocator.available_size()
    assert reserve(kv, reqs, 1) == [row(kv, req)[req.kv_len] for req in reqs]
    assert kv.allocator.available_size() == free


def test_a_run_in_reserve_does_not_reach_beyond_the_table() -> None:
    kv = new_kv(1)
    kv.req_to_token_pool = ReqToTokenPool(8, 35)
    req = started(kv, range(33))
    reserve(kv, [req], 1)
    assert req.reserved_len == 35
    assert_sound(kv, [req])


@PAGES
def test_a_narrow_reserve_takes_nothing_from_a_row_that_has_more(page_size: int) -> None:
    kv = new_kv(page_size)
    req = started(kv, range(10))
    reserve(kv, [req], 6)
    free = kv.allocator.available_size()
    draw(req, 2)
    assert reserve(kv, [req], 1) == [row(kv, req)[12]]
    assert req.reserved_len == 16 and kv.allocator.available_size() == free


@PAGES
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_a_release_keeps_the_pages_of_tokens_and_frees_the_reserve(
    page_size: int, cached: bool, keep: bool
) -> None:
    kv = new_kv(page_size, cached=cached)
    reqs = [started(kv, range(100, 118)), started(kv, range(200, 209))]
    reserve(kv, reqs, 20)
    draw(reqs[0], 3)
    known = reqs[0].token_ids()
    kv.release(reqs[0], keep=keep)
    assert (reqs[0].kv_len, reqs[0].reserved_len, reqs[0].shared_len) == (0, 0, 0)
    assert_sound(kv, reqs[1:])
    kept = (21 if keep else 18) // page_size * page_size if cached else 0
    assert len(kv.prefix_cache.match_prefix(None, known)) == kept
    kv.release(reqs[1], keep=keep)
    assert kv.used() == 0 and kv.req_to_token_pool.available_size() == 8
    kv.flush()
    assert kv.allocator.available_size() == kv.size


@PAGES
def test_a_reserve_without_room_changes_nothing(page_size: int) -> None:
    kv = new_kv(page_size, pool_tokens=64)
    reqs = [started(kv, range(100, 118)), started(kv, range(200, 217))]
    reserve(kv, reqs, 3)
    before = [row(kv, req) for req in reqs], kv.allocator.available_size(), kv.prefix_cache.total_size()
    assert reserve(kv, reqs, 40) is None
    assert before == ([row(kv, r) for r in reqs], kv.allocator.available_size(), kv.prefix_cache.total_size())
    assert_sound(kv, reqs)


@PAGES
def test_a_reserve_evicts_what_nobody_uses(page_size: int) -> None:
    kv = new_kv(page_size, pool_tokens=64)
    kv.release(started(kv, range(32)), keep=True)
    req = started(kv, range(100, 116))
    assert kv.prefix_cache.evictable_size() == 32
    assert reserve(kv, [req], 30) is not None
    assert_sound(kv, [req])
    assert kv.prefix_cache.evictable_size() < 32


@PAGES
def test_a_request_with_slots_in_reserve_takes_over_what_others_cached_first(page_size: int) -> None:
    """Two computed the same tokens: the second gives its own slots of them back, not those behind them."""
    kv = new_kv(page_size)
    second, first = started(kv, range(5)), started(kv, range(20))
    reserve(kv, [first, second], 30)
    second.output_ids = [*range(5, 20), 7]
    second.kv_len = 20
    kept = row(kv, second)[20 // page_size * page_size :]
    kv.commit(first), kv.commit(second)
    assert_sound(kv, [first, second])
    end = 20 // page_size * page_size
    assert row(kv, second)[:end] == row(kv, first)[:end] and row(kv, second)[end:] == kept
    for req in (first, second):
        kv.release(req, keep=True)
    assert kv.used() == 0


@settings(max_examples=60)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    script=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(0, 5)), max_size=25),
)
def test_the_books_add_up_after_any_rounds(page_size: int, script: list[tuple[int, int, int]]) -> None:
    kv = new_kv(page_size)
    reqs: list[Req] = []
    for turn, (count, emitted, deed) in enumerate(script):
        if deed == 0 and len(reqs) < 4:
            if kv.room() >= 48:
                reqs.append(started(kv, [turn, *range(count, 30)]))
        elif deed == 1 and reqs:
            kv.release(reqs.pop(emitted % len(reqs)), keep=count % 2 == 0)
        elif reqs and max(req.kv_len for req in reqs) + count <= 128 and reserve(kv, reqs, count) is not None:
            for place, req in enumerate(reqs):
                draw(req, min(emitted + place, count))
        assert_sound(kv, reqs)
    for req in reqs:
        kv.release(req, keep=True)
    assert kv.used() == 0

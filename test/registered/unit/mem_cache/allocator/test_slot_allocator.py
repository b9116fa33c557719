"""Slots are handed out once, in whole pages, in runs of neighbours where there are some."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.allocator import make_slot_allocator


def test_one_request_gets_neighbours_even_between_holes() -> None:
    allocator = make_slot_allocator(20, 1)
    slots = allocator.alloc_extend(0, 20, 0)
    assert slots is not None
    allocator.free(slots[[0, 2, 4, 9, 10, 11, 12, 17]])
    run = allocator.alloc_extend(0, 4, 0)
    assert run is not None and np.diff(run).tolist() == [1, 1, 1]
    assert sorted(run.tolist()) == slots[9:13].tolist()


def test_scattered_pages_serve_when_no_run_is_long_enough() -> None:
    allocator = make_slot_allocator(10, 1)
    slots = allocator.alloc_extend(0, 10, 0)
    assert slots is not None
    allocator.free(slots[::2])
    got = allocator.alloc_extend(0, 5, 0)
    assert got is not None and sorted(got.tolist()) == slots[::2].tolist()
    assert allocator.alloc_extend(0, 1, 0) is None


def test_slots_that_lie_singly_for_want_of_blocks_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    allocator = make_slot_allocator(64, 1)
    slots = allocator.alloc_extend(0, 48, 0)
    assert slots is not None and not caplog.records  # three blocks of neighbours
    for step in range(3):
        assert allocator.alloc_decode(np.array([step]), np.array([0]), np.array([0])) is not None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "not enough blocks of 16 neighbours" in said[0], said
    prompts = make_slot_allocator(64, 1)
    prompts.alloc_extend(0, 60, 0)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_ask_that_does_not_fit_takes_nothing(page_size: int) -> None:
    allocator = make_slot_allocator(4, page_size)
    assert allocator.alloc_extend(0, 4 * page_size + 1, 0) is None
    assert allocator.available_size() == allocator.size == 4 * page_size
    full = allocator.alloc_extend(0, 4 * page_size, 0)
    assert full is not None and len(full) == 4 * page_size
    assert allocator.alloc_decode(np.array([page_size]), np.array([page_size]), full[-1:]) is None


def test_page_zero_is_nobodys() -> None:
    """Padding rows write there, and table entries that were never written point there."""
    for page_size in (1, 16):
        allocator = make_slot_allocator(3, page_size)
        slots = allocator.alloc_extend(0, allocator.size, 0)
        assert slots is not None and slots.min() == page_size and slots.max() == 4 * page_size - 1


def test_a_request_fills_its_last_page_before_it_gets_a_new_one() -> None:
    allocator = make_slot_allocator(8, 4)
    slots = allocator.alloc_extend(0, 6, 0)
    assert slots is not None and allocator.available_size() == 24
    more = allocator.alloc_extend(6, 9, int(slots[-1]))
    assert more is not None and more[:2].tolist() == [slots[-1] + 1, slots[-1] + 2]
    assert more[2] % 4 == 0 and allocator.available_size() == 20
    lengths = np.array([9, 8])
    decoded = allocator.alloc_decode(lengths, lengths, np.array([more[-1], 7]))
    assert decoded is not None and decoded[0] == more[-1] + 1 and decoded[1] % 4 == 0
    assert allocator.available_size() == 16


@pytest.mark.parametrize("page_size", [1, 16])
def test_freeing_what_nobody_holds_is_an_error_with_its_number(page_size: int) -> None:
    allocator = make_slot_allocator(8, page_size)
    slots = allocator.alloc_extend(0, 2 * page_size, 0)
    assert slots is not None
    allocator.free(slots[:page_size])
    with pytest.raises(RuntimeError, match="nobody holds"):
        allocator.free(slots[:page_size])
    assert allocator.available_size() == 7 * page_size


def test_a_page_named_twice_in_one_free_is_an_error() -> None:
    allocator = make_slot_allocator(8, 1)
    slots = allocator.alloc_extend(0, 2, 0)
    assert slots is not None
    with pytest.raises(RuntimeError, match="twice"):
        allocator.free(slots[[0, 0]])


def test_a_freed_view_may_be_overwritten_by_its_owner() -> None:
    """The caller frees a view of its table and then writes other slots there."""
    allocator = make_slot_allocator(4, 1)
    table = np.zeros(4, dtype=np.int64)
    table[:] = allocator.alloc_extend(0, 4, 0)
    allocator.free(table[:2])
    table[:] = 99
    again = allocator.alloc_extend(0, 2, 0)
    assert again is not None and again.max() <= 4


@settings(max_examples=60)
@given(page_size=st.sampled_from([1, 3, 16]), asks=st.lists(st.integers(0, 40), max_size=60))
def test_no_slot_is_ever_held_twice(page_size: int, asks: list[int]) -> None:
    allocator = make_slot_allocator(12, page_size)
    held: list[np.ndarray] = []
    for ask in asks:
        if ask % 3 == 0 and held:
            allocator.free(held.pop(ask % len(held)))
        else:
            slots = allocator.alloc_extend(0, ask, 0)
            if slots is not None:
                held.append(slots)
            else:
                assert -(-ask // page_size) * page_size > allocator.available_size()
        pages = [page for slots in held for page in set((slots // page_size).tolist())]
        assert len(pages) == len(set(pages))
        assert len(pages) * page_size + allocator.available_size() == allocator.size


def in_blocks(slots: np.ndarray, first: int = 0) -> bool:
    """Whether tokens from `first` on lie at their place of blocks of 16 neighbours."""
    places = np.arange(first, first + len(slots))
    begins = slots - places % 16
    return bool((begins % 16 == 0).all()) and len(set(begins.tolist())) == len(set((places // 16).tolist()))


def test_requests_that_grow_side_by_side_keep_blocks_of_their_own() -> None:
    """Prompts of odd lengths, in chunks, then 60 steps together, some of two tokens."""
    allocator = make_slot_allocator(1000, 1)
    tables = []
    for length in (5, 30, 16, 47):
        slots = allocator.alloc_extend(0, length - 3, 0)
        assert slots is not None
        more = allocator.alloc_extend(length - 3, length, int(slots[-1]))
        assert more is not None
        tables.append(np.concatenate((slots, more)))
    for step in range(60):
        count = 2 if step % 5 == 0 else 1
        lengths = np.repeat([len(table) for table in tables], count)
        positions = lengths + np.tile(np.arange(count), len(tables))
        taken = allocator.alloc_decode(positions, lengths, np.repeat([t[-1] for t in tables], count))
        assert taken is not None
        tables = [np.concatenate(pair) for pair in zip(tables, taken.reshape(-1, count), strict=True)]
    assert all(in_blocks(table) for table in tables)
    assert len(set(np.concatenate(tables).tolist())) == sum(map(len, tables))


def test_a_request_behind_a_cached_prefix_begins_at_its_place_in_a_block() -> None:
    allocator = make_slot_allocator(200, 1)
    prefix = allocator.alloc_extend(0, 21, 0)
    assert prefix is not None
    first, second = (allocator.alloc_extend(21, 60, int(prefix[-1])) for _ in range(2))
    assert first is not None and second is not None
    assert in_blocks(np.concatenate((prefix, first))), "it goes on where the prefix ends"
    assert in_blocks(second, 21) and not set(first.tolist()) & set(second.tolist())


def test_two_requests_with_one_last_slot_get_two_slots() -> None:
    allocator = make_slot_allocator(100, 1)
    slots = allocator.alloc_extend(0, 20, 0)
    assert slots is not None
    taken = allocator.alloc_decode(np.array([20, 20]), np.array([20, 20]), slots[[-1, -1]])
    assert taken is not None and taken[0] != taken[1] and taken.max() <= 100


def test_a_pool_without_whole_blocks_is_used_to_its_last_slot() -> None:
    allocator = make_slot_allocator(50, 1)
    held = [allocator.alloc_extend(0, 3, 0) for _ in range(4)]
    lengths = np.array([3, 3, 3, 3])
    last = np.array([slots[-1] for slots in held if slots is not None])
    seen = np.concatenate([slots for slots in held if slots is not None]).tolist()
    while (taken := allocator.alloc_decode(lengths, lengths, last)) is not None:
        seen += taken.tolist()
        lengths, last = lengths + 1, taken
    assert allocator.available_size() == 50 - len(seen) < 4 and len(set(seen)) == len(seen)
    rest = allocator.alloc_extend(0, allocator.available_size(), 0)
    assert rest is not None and sorted([*seen, *rest.tolist()]) == list(range(1, 51))

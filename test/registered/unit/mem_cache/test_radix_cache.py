"""The radix tree: matches in whole pages, apart by extra_key, least recently used first out, never what is
locked.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.base_prefix_cache import common_prefix_length
from sglang.srt.mem_cache.evict_policy import make_evict_policy
from sglang.srt.mem_cache.radix_cache import RadixCache


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def fill(cache: RadixCache, tokens: np.ndarray, first_slot: int, key: str | None = None) -> int:
    """Insert with the slots `first_slot, first_slot + 1, ...`; returns how much existed."""
    slots = np.arange(first_slot, first_slot + len(tokens), dtype=np.int64)
    return cache.insert(key, tokens, slots).existing


def test_a_prefix_is_found_with_the_slots_that_were_put_in() -> None:
    cache = RadixCache(1)
    fill(cache, ids(1, 2, 3, 4, 5), 100)
    assert cache.match_prefix(None, ids(1, 2, 3, 9)).slots.tolist() == [100, 101, 102]
    assert len(cache.match_prefix(None, ids(9, 1, 2))) == 0
    assert len(cache.match_prefix(None, ids())) == 0
    assert cache.match_prefix(None, ids(1, 2, 3, 4, 5, 6)).slots.tolist() == [100, 101, 102, 103, 104]


def test_a_branch_keeps_the_common_part_once() -> None:
    cache = RadixCache(1)
    assert fill(cache, ids(1, 2, 3, 4), 10) == 0
    assert fill(cache, ids(1, 2, 7, 8), 20) == 2
    assert cache.total_size() == 6
    assert cache.match_prefix(None, ids(1, 2, 7, 8)).slots.tolist() == [10, 11, 22, 23]
    assert cache.match_prefix(None, ids(1, 2, 3, 4)).slots.tolist() == [10, 11, 12, 13]


def test_pages_are_shared_whole_or_not_at_all() -> None:
    cache = RadixCache(16)
    tokens = np.arange(50)
    fill(cache, tokens, 160)
    assert cache.total_size() == 48
    other = tokens.copy()
    other[40] = 999
    assert len(cache.match_prefix(None, other)) == 32
    assert len(cache.match_prefix(None, tokens[:31])) == 16
    assert len(cache.match_prefix(None, tokens[:15])) == 0
    other = tokens.copy()
    other[3] = 999
    assert len(cache.match_prefix(None, other)) == 0


def test_namespaces_never_see_each_other() -> None:
    """A tenant's salt must keep others from learning, by a hit, what was asked."""
    cache = RadixCache(1)
    fill(cache, ids(1, 2, 3), 10, "a")
    fill(cache, ids(1, 2, 3), 20, None)
    assert len(cache.match_prefix("b", ids(1, 2, 3))) == 0
    assert cache.match_prefix("a", ids(1, 2, 3)).slots.tolist() == [10, 11, 12]
    assert cache.match_prefix(None, ids(1, 2, 3)).slots.tolist() == [20, 21, 22]
    assert len(cache.match_prefix("", ids(1, 2, 3))) == 0


def test_an_empty_namespace_leaves_nothing_behind() -> None:
    """Salts may be random for each request: an evicted one must not keep a root for ever."""
    cache = RadixCache(1)
    for salt in range(50):
        fill(cache, ids(1, 2, 3), salt * 10, f"salt-{salt}")
    assert len(cache.evict(10_000)) == 150
    assert cache._roots == {} and cache._heap == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(1)
    for start in (10, 20, 30):
        fill(cache, ids(start, start + 1), start)
    cache.match_prefix(None, ids(10, 11))
    assert cache.evict(2).tolist() == [20, 21]
    assert cache.evict(2).tolist() == [30, 31]
    assert cache.evict(2).tolist() == [10, 11]
    assert cache.total_size() == 0


def test_only_as_much_of_a_leaf_goes_as_is_needed() -> None:
    cache = RadixCache(4)
    fill(cache, np.arange(32), 100)
    assert cache.evict(5).tolist() == list(range(124, 132))
    assert cache.match_prefix(None, np.arange(32)).slots.tolist() == list(range(100, 124))
    assert cache.evictable_size() == 24


def test_a_parent_can_go_once_its_children_went() -> None:
    cache = RadixCache(1)
    fill(cache, ids(1, 2, 3), 10)
    fill(cache, ids(1, 2, 4), 20)
    assert sorted(cache.evict(100).tolist()) == [10, 11, 12, 22]


def test_what_is_locked_stays_and_is_not_counted_as_room() -> None:
    cache = RadixCache(1)
    fill(cache, ids(1, 2, 3, 4), 10)
    fill(cache, ids(1, 2, 8, 9), 20)
    match = cache.match_prefix(None, ids(1, 2, 3))
    cache.lock(match.node)
    assert (cache.evictable_size(), cache.protected_size()) == (3, 3)
    assert sorted(cache.evict(100).tolist()) == [13, 22, 23]
    assert cache.match_prefix(None, ids(1, 2, 3)).slots.tolist() == [10, 11, 12]
    cache.unlock(match.node)
    assert sorted(cache.evict(100).tolist()) == [10, 11, 12]


def test_a_lock_survives_the_split_of_its_node() -> None:
    """A request holds the handle of a long node; another prompt then branches off in its middle."""
    cache = RadixCache(1)
    fill(cache, ids(1, 2, 3, 4), 10)
    held = cache.match_prefix(None, ids(1, 2, 3, 4)).node
    cache.lock(held)
    fill(cache, ids(1, 2, 7), 20)
    assert cache.protected_size() == 4
    cache.unlock(held)
    assert cache.protected_size() == 0
    with pytest.raises(RuntimeError, match="nobody holds"):
        cache.unlock(held)


def test_clearing_is_refused_while_something_is_locked() -> None:
    cache = RadixCache(1)
    fill(cache, ids(1, 2), 10)
    node = cache.match_prefix(None, ids(1, 2)).node
    cache.lock(node)
    with pytest.raises(RuntimeError, match="2 of its tokens are in use"):
        cache.clear()
    cache.unlock(node)
    assert cache.clear().tolist() == [10, 11]
    assert cache.total_size() == 0 and len(cache.match_prefix(None, ids(1, 2))) == 0


def test_a_common_prefix_is_counted_to_the_first_difference_or_the_shorter_end() -> None:
    a, b = np.arange(10), np.arange(10)
    b[4] = 0
    assert common_prefix_length(a, b) == 4
    assert common_prefix_length(a, a[:3]) == 3
    assert common_prefix_length(a, a[:0]) == 0


def test_an_unknown_eviction_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"radix_eviction_policy.*lru.*'lifo'"):
        make_evict_policy("lifo")


class Model:
    """The same cache without a tree: every cached prefix of whole pages by itself, with the slots of its
    last page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def ends(self, tokens: list[int]) -> range:
        return range(self.page_size, len(tokens) + 1, self.page_size)

    def match(self, key: str, tokens: list[int]) -> list[int]:
        slots: list[int] = []
        for end in self.ends(tokens):
            page = self.page_of.get((key, tuple(tokens[:end])))
            if page is None:
                break
            slots += page
        return slots

    def insert(self, key: str, tokens: list[int], slots: list[int]) -> None:
        for end in self.ends(tokens):
            self.page_of.setdefault((key, tuple(tokens[:end])), slots[end - self.page_size : end])

    def forget(self, slots: list[int]) -> None:
        gone = set(slots)
        self.page_of = {name: page for name, page in self.page_of.items() if page[0] not in gone}

    def size(self) -> int:
        return len(self.page_of) * self.page_size


@settings(max_examples=80)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["insert", "match", "evict", "lock", "unlock"]),
            st.sampled_from(["a", "b"]),
            st.lists(st.integers(0, 2), max_size=12),
        ),
        max_size=40,
    ),
)
def test_the_tree_agrees_with_a_plain_list(page_size: int, steps: list[tuple[str, str, list[int]]]) -> None:
    cache, model = RadixCache(page_size), Model(page_size)
    next_slot, locks = 0, []
    for deed, key, tokens in steps:
        array = np.array(tokens, dtype=np.int64)
        if deed == "insert":
            # Slots come in pages, as the allocator gives them.
            slots = list(range(next_slot, next_slot + len(tokens)))
            next_slot += len(tokens)
            before = len(model.match(key, tokens))
            assert cache.insert(key, array, np.array(slots, dtype=np.int64)).existing == before
            model.insert(key, tokens, slots)
        elif deed == "match":
            assert cache.match_prefix(key, array).slots.tolist() == model.match(key, tokens)
        elif deed == "lock":
            match = cache.match_prefix(key, array)
            cache.lock(match.node)
            locks.append((match, key, tokens))
        elif deed == "unlock" and locks:
            cache.unlock(locks.pop(len(tokens) % len(locks))[0].node)
        elif deed == "evict":
            room = cache.evictable_size()
            gone = cache.evict(len(tokens)).tolist()
            assert len(gone) >= min(len(tokens), room)
            model.forget(gone)
        for match, locked_key, locked in locks:
            assert model.match(locked_key, locked)[: len(match)] == match.slots.tolist()
        nodes = list(cache.nodes())
        assert sum(len(node.ids) for node in nodes) == cache.total_size() == model.size()
        assert sum(len(node.ids) for node in nodes if node.locks) == cache.protected_size()

"""Work of the radix tree is linear in the tokens, whatever branches cut them: ids that are read or copied are
counted, not time.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang.srt.mem_cache import radix_cache
from sglang.srt.mem_cache.radix_cache import RadixCache

TOKENS = 4096
BRANCHES = [1, 16, 256, 1024]


class Counted(np.ndarray):
    """Ids that count how many of them are read or copied; so do slices and copies of them."""

    looked_at = 0

    def tobytes(self, *given: Any, **named: Any) -> bytes:
        Counted.looked_at += self.size
        return super().tobytes(*given, **named)

    def copy(self, *given: Any, **named: Any) -> "Counted":
        Counted.looked_at += self.size
        return super().copy(*given, **named)

    def __ne__(self, other: Any) -> Any:
        Counted.looked_at += self.size
        return np.asarray(self) != np.asarray(other)


def counted(values: np.ndarray) -> np.ndarray:
    return values.view(Counted)


def branched(cache: RadixCache, branches: int) -> np.ndarray:
    """A prompt whose edge other prompts cut at as many places, evenly."""
    prompt = np.arange(TOKENS)
    cache.insert(None, counted(prompt), np.arange(TOKENS))
    for number, at in enumerate(range(0, TOKENS, TOKENS // branches)):
        other = np.append(prompt[:at], [100_000 + number] * cache.page_size)
        cache.insert(None, counted(other), np.arange(len(other)) + TOKENS * (number + 1))
    return counted(prompt)


def looked_at(work: Callable[[], object]) -> int:
    Counted.looked_at = 0
    work()
    return Counted.looked_at


class CopyingCache(RadixCache):
    """A planted mistake: what is left of the ids is copied at each edge."""

    def _descend(self, node: Any, ids: np.ndarray) -> Any:
        pieces = []
        while len(ids) and (child := node.children.get(self._page_key(ids))) is not None:
            common = radix_cache.common_prefix_length(child.ids, ids)
            if common < len(child.ids):
                child = self._split(child, common)
            pieces.append(child.slots)
            node, ids = child, ids[common:].copy()
        return node, pieces


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("branches", BRANCHES)
def test_a_match_looks_at_each_token_a_few_times_however_often_it_was_cut(
    branches: int, page_size: int
) -> None:
    cache = RadixCache(page_size)
    prompt = branched(cache, branches)
    assert len(cache.match_prefix(None, prompt)) == TOKENS
    assert looked_at(lambda: cache.match_prefix(None, prompt)) <= 3 * TOKENS


@pytest.mark.parametrize("branches", BRANCHES)
def test_so_does_an_insertion_that_goes_on_behind_all_of_them(branches: int) -> None:
    cache = RadixCache(1)
    prompt = branched(cache, branches)
    longer = counted(np.append(prompt, [7, 8, 9]))
    assert looked_at(lambda: cache.insert(None, longer, np.arange(len(longer)))) <= 3 * TOKENS


@pytest.mark.parametrize("branches", BRANCHES)
def test_eviction_token_by_token_looks_at_few_tokens_each_time(branches: int) -> None:
    cache = RadixCache(1)
    branched(cache, branches)

    def evict_all() -> None:
        while cache.evictable_size():
            cache.evict(1)

    assert looked_at(evict_all) <= 3 * (TOKENS + branches)


def test_copying_what_is_left_at_each_edge_is_noticed() -> None:
    cache = CopyingCache(1)
    prompt = branched(cache, 1024)
    assert looked_at(lambda: cache.match_prefix(None, prompt)) > 100 * TOKENS

"""The choice of combinations: every two values meet, and what is missing is seen."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import itertools
from collections.abc import Sequence

import pytest

from sglang.test.pairwise import pairwise


def missing_pairs(rows: Sequence[tuple[int, ...]], *sizes: int) -> set[tuple[int, int, int, int]]:
    """(factor, value, other factor, other value) of every two values that meet in no row."""
    wanted = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for x in range(sizes[a])
        for y in range(sizes[b])
    }
    return wanted - {
        (a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(range(len(sizes)), 2)
    }


@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [((5, 5, 2, 2), 25), ((2, 2, 5, 5), 25), ((4, 3, 2), 12), ((3, 3), 9), ((3, 2, 2, 2), 6), ((4,), 4)],
)
def test_every_two_values_meet_in_few_rows(sizes: tuple[int, ...], num_rows: int) -> None:
    rows = pairwise(*(range(size) for size in sizes))
    assert missing_pairs(rows, *sizes) == set()
    assert len(rows) == len(set(rows)) == num_rows
    assert rows == pairwise(*(range(size) for size in sizes))


def test_pairs_that_no_row_of_the_longest_factors_can_take_get_rows_of_their_own() -> None:
    sizes = (3, 3, 3, 3, 3)
    rows = pairwise(*(range(size) for size in sizes))
    assert missing_pairs(rows, *sizes) == set()
    assert 9 < len(rows) < 3**5 / 4


def test_a_row_that_is_left_out_is_missed() -> None:
    rows = pairwise(range(5), range(5), range(2))
    assert all(missing_pairs([*rows[:at], *rows[at + 1 :]], 5, 5, 2) for at in range(len(rows)))

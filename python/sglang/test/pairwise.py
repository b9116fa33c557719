"""Owns the choice of a few combinations of settings in which every two values of two factors meet.

Read by matrices of tests whose product would take too long. It must not know what the values are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

#: A value of a factor: the number of the factor, and that of the value in it.
Setting = tuple[int, int]


def pairwise(*factors: Sequence[object]) -> list[tuple[int, ...]]:
    """Combinations, as one index a factor, so that each pair of values of two factors is in one of them.

    Starts from the product of the two longest factors and gives each row of it the value of one more factor
    after another: the one that makes the most new pairs, of equals the one taken least often, then the first.
    Rows are added for pairs that are missing then. The same factors give the same list.
    """
    order = sorted(range(len(factors)), key=lambda number: -len(factors[number]))
    first, *others = order
    rows: list[dict[int, int]] = [{first: value} for value in range(len(factors[first]))]
    done = [first]
    for number in others:
        if len(done) == 1:
            rows = [row | {number: value} for row in rows for value in range(len(factors[number]))]
        else:
            _extend(rows, number, len(factors[number]), {other: len(factors[other]) for other in done})
        done.append(number)
    return sorted(tuple(row[number] for number in range(len(factors))) for row in rows)


def _extend(rows: list[dict[int, int]], number: int, num_values: int, sizes: Mapping[int, int]) -> None:
    """Give each row a value of the next factor; `sizes` are those of the factors that rows have already."""
    missing = {
        (setting, value)
        for value in range(num_values)
        for other, size in sizes.items()
        for setting in ((other, index) for index in range(size))
    }
    taken: Counter[int] = Counter()

    def made(row: Mapping[int, int], value: int) -> set[tuple[Setting, int]]:
        return missing & {(setting, value) for setting in row.items()}

    for row in rows:
        value = max(range(num_values), key=lambda value: (len(made(row, value)), -taken[value]))
        missing -= made(row, value)
        taken[value] += 1
        row[number] = value
    for (other, index), value in sorted(missing):
        rows.append({**dict.fromkeys(sizes, 0), other: index, number: value})

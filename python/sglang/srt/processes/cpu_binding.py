"""Owns the reading of `SGLANG_CPU_OMP_THREADS_BIND`: one core list per rank of this host, as `0-15|16-31`.

Read by whoever starts ranks (thread count) and by a rank (affinity). It must not bind where the variable is
not set.
"""

from __future__ import annotations

import os

from sglang.srt.environ import envs


def cores_of_rank(rank: int, num_ranks: int) -> frozenset[int] | None:
    """The cores that the variable gives this rank, None when it is not set."""
    text = envs.SGLANG_CPU_OMP_THREADS_BIND.get()
    if not text:
        return None
    lists = parse_core_lists(text)
    if len(lists) != num_ranks:
        raise ValueError(
            f"SGLANG_CPU_OMP_THREADS_BIND={text!r}: names cores for {len(lists)} ranks, "
            f"and there are {num_ranks}"
        )
    return lists[rank]


def bind_to(cores: frozenset[int]) -> None:
    """Keep this process on these cores; `ValueError` when it may not use them."""
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError) as error:
        usable = sorted(os.sched_getaffinity(0))
        raise ValueError(
            f"SGLANG_CPU_OMP_THREADS_BIND: a rank cannot run on {sorted(cores)}; this process may use the "
            f"cores {usable}"
        ) from error


def parse_core_lists(text: str) -> list[frozenset[int]]:
    """`"0-2,5|3"` -> `[{0, 1, 2, 5}, {3}]`."""
    lists = []
    for part in text.split("|"):
        cores: set[int] = set()
        for span in part.split(","):
            first, dash, last = span.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError(
                    f"SGLANG_CPU_OMP_THREADS_BIND={text!r}: {span!r} is neither a core nor a span like 0-3"
                )
            low, high = int(first), int(last) if dash else int(first)
            if high < low:
                raise ValueError(f"SGLANG_CPU_OMP_THREADS_BIND={text!r}: the span {span!r} runs backwards")
            cores.update(range(low, high + 1))
        lists.append(frozenset(cores))
    return lists

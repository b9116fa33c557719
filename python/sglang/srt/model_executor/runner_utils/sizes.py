"""Owns the numbers of requests for which graphs are recorded, and whether there is memory to record them.

Read by graph runners and by whoever sets them up. It must not look at a batch: every number here is one that
all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.distributed.group_coordinator import GroupCoordinator

#: The largest batch that is recorded where nobody says: above it a CPU is busy with products.
MOST_REQUESTS_ON_CPU = 32
#: Free memory below which nothing is recorded.
LEAST_FREE_BYTES = 1 << 30


def default_sizes(max_requests: int, *, width: int = 1, attn_tp_size: int = 1) -> list[int]:
    """1 to 8, every 4 up to the maximum, and that, ascending; only those that `attn_tp_size` ranks can share.

    A CPU computes padding like anything else, so a batch of 6 must not cost as much as one of 8.
    Rows are `size * width`. Where they cannot be shared the maximum is rounded up, so that every batch fits.
    """
    largest = max_requests
    while largest * width % attn_tp_size:
        largest += 1
    smaller = [size for size in (*range(1, 8), *range(8, max_requests, 4)) if size < largest]
    return [*(size for size in smaller if size * width % attn_tp_size == 0), largest]


def check_sizes(sizes: Sequence[int], *, width: int, attn_tp_size: int) -> None:
    """`ValueError` for sizes whose rows the ranks of an attention-TP group cannot share."""
    wrong = [size for size in sizes if size < 1 or size * width % attn_tp_size]
    if wrong or not sizes:
        fitting = default_sizes(max([8, *sizes]), width=width, attn_tp_size=attn_tp_size)
        raise ValueError(
            f"--cuda-graph-bs-decode {' '.join(map(str, sizes))}: with attention-TP {attn_tp_size} and width "
            f"{width} captured sizes must be positive and their rows multiples of {attn_tp_size}; use "
            f"{' '.join(map(str, fitting))}"
        )


def size_for(sizes: Sequence[int], num_requests: int) -> int | None:
    """The smallest of the sizes that holds so many requests; None where none does."""
    return min((size for size in sizes if size >= num_requests), default=None)


def least_of_group(value: int, group: GroupCoordinator | None) -> int:
    """The smallest value of all ranks of the group that will record together; None: this rank alone."""
    return value if group is None else min(group.all_gather_object(value))


def may_capture(free_bytes: int, group: GroupCoordinator | None) -> bool:
    """Whether every rank of the group has memory for graphs; all of them get the same answer."""
    return least_of_group(free_bytes, group) >= LEAST_FREE_BYTES

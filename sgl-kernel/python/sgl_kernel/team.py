"""Owns what is told of the kernels' own threads: how many there are, and what they have done.

Read by benchmarks and the tests. How many threads a call may use is what `torch.get_num_threads()` says when
it runs; nothing is set here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TeamCounts(NamedTuple):
    """Counts of this process, since its start."""

    #: Threads beside the callers' own.
    workers: int
    #: Calls that were given to more than one thread.
    calls: int
    #: Parts of those that another thread than the caller computed.
    worker_shares: int
    #: Calls that waited long for a thread whose core somebody else had taken.
    stalls: int


def team_counts() -> TeamCounts:
    """What the threads of the kernels have done in this process."""
    return TeamCounts(*torch.ops.sgl_kernel.team_counts())

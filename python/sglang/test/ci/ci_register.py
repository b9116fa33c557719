"""Owns how a test file names its lane: `register_cpu_ci(est_time=5, suite="unit-cpu")` at its top.

Read by `scripts/run_suite.py`, which finds the calls in the source without running it. The calls must not
refuse the name of an unknown lane: the runner does, so that test files from elsewhere can be collected too.
"""

from __future__ import annotations

# lane -> the folder under test/registered/ that holds its files. The order is the order in which the lanes
# run.
SUITES: dict[str, str] = {
    "unit-cpu": "unit",
    "multi-rank-cpu": "multi_rank",
    "server-cpu": "server",
    "gpu": "gpu",
}
# The lanes that need no accelerator: what `make test` runs.
CPU_SUITES: tuple[str, ...] = ("unit-cpu", "multi-rank-cpu", "server-cpu")


def register_cpu_ci(est_time: float, suite: str) -> None:
    """This file needs no accelerator, takes about so many seconds, and belongs to this lane."""
    _check("register_cpu_ci", est_time, suite)


def register_cuda_ci(est_time: float, suite: str) -> None:
    """This file needs a CUDA device."""
    _check("register_cuda_ci", est_time, suite)


def _check(name: str, est_time: float, suite: str) -> None:
    if isinstance(est_time, bool) or not isinstance(est_time, int | float) or est_time <= 0:
        raise ValueError(f"{name}: est_time is a positive number of seconds, got {est_time!r}")
    if not isinstance(suite, str) or not suite:
        raise ValueError(f"{name}: suite is the name of a lane, got {suite!r}")

"""Owns how a test waits for something that another thread or process does: it polls a condition.

Read by all lanes, from plain code (`wait_until`) and on an event loop (`until`). The one limit is a guard
against hanging, far above what a slow machine needs, so a test that waits asserts nothing about time. It must
not sleep for a fixed time: to see that something does not happen, wait for something that comes after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: The limit of every wait in a test: for a condition, a process, a thread or an answer. Below pytest's own.
HANG_GUARD_S = 180.0
_PAUSE_S = 0.01


def wait_until(condition: Callable[[], object], describe: Callable[[], str] | None = None) -> None:
    """Return when the condition holds; an assertion, with what `describe` says, when it never does."""
    if not holds_within(HANG_GUARD_S, condition):
        raise AssertionError(_never(describe))


async def until(condition: Callable[[], object], describe: Callable[[], str] | None = None) -> None:
    """The same on an event loop, where other tasks go on."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(_never(describe))
        await asyncio.sleep(_PAUSE_S / 10)


def holds_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether the condition becomes true in this time; for helpers that have a limit, not for tests."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def outlast(limit_s: float) -> None:
    """Sleep longer than a limit of the product; the test must pass however much longer it is."""
    time.sleep(1.25 * limit_s)


def _never(describe: Callable[[], str] | None) -> str:
    return f"not within {HANG_GUARD_S:.0f} s" + (f":\n{describe()}" if describe else "")

"""Owns how a test waits for something that others do: it looks again until it holds.

Read by all lanes, by plain code (`wait_until`) and inside an event loop (`until`). Its one limit is a guard
against hanging, far above what a slow machine needs, so a test that waits says nothing about time. It must
not sleep for a fixed time: whoever wants nothing to happen waits for something that comes after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

#: The limit of every wait in a test: for a condition, a process, a thread or an answer. Below pytest's own.
HANG_GUARD_S = 180.0
_PAUSE_S = 0.01


def wait_until(condition: Callable[[], Any], describe: Callable[[], str] | None = None) -> None:
    """Return when the condition holds; an assertion, with what `describe` says, when it never does."""
    if not holds_within(HANG_GUARD_S, condition):
        raise AssertionError(_never(describe))


async def until(condition: Callable[[], Any], describe: Callable[[], str] | None = None) -> None:
    """The same where others run on this event loop."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(_never(describe))
        await asyncio.sleep(_PAUSE_S / 10)


def holds_within(seconds: float, condition: Callable[[], Any]) -> bool:
    """Whether the condition comes to hold in this time: for helpers with a limit of their own, not for
    tests.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def outlast(limit_s: float) -> None:
    """Come later than a limit of the product allows. However much later that is, the test must hold."""
    time.sleep(1.25 * limit_s)


def _never(describe: Callable[[], str] | None) -> str:
    return f"not within {HANG_GUARD_S:.0f} s" + (f":\n{describe()}" if describe else "")

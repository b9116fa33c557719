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
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        _give_up_after(deadline, describe)
        time.sleep(_PAUSE_S)


async def until(condition: Callable[[], Any], describe: Callable[[], str] | None = None) -> None:
    """The same where others run on this event loop."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        _give_up_after(deadline, describe)
        await asyncio.sleep(_PAUSE_S / 10)


def outlast(limit_s: float) -> None:
    """Come later than a limit of the product allows. However much later that is, the test must hold."""
    time.sleep(1.25 * limit_s)


def _give_up_after(deadline: float, describe: Callable[[], str] | None) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(f"not within {HANG_GUARD_S:.0f} s" + (f":\n{describe()}" if describe else ""))

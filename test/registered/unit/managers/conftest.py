"""Fixtures of the scheduler tests: a factory whose published configuration is gone after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import reset_context
from sglang.test.fakes.scheduler_driver import create_scheduler


@pytest.fixture
def new_scheduler() -> Iterator[Callable[..., Scheduler]]:
    """`create_scheduler`, as often as a test likes; nothing stays published afterwards."""
    yield create_scheduler
    reset_context()

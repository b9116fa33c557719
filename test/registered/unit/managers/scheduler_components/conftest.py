"""Owns the end of every test of a scheduler's part: nothing stays published."""

from collections.abc import Iterator

import pytest

from sglang.srt.runtime_context import reset_context


@pytest.fixture(autouse=True)
def nothing_stays_published() -> Iterator[None]:
    yield
    reset_context()

"""Every test here starts from an empty context and must close its scopes; the process is left empty again."""

from collections.abc import Iterator

import pytest

from sglang.srt.runtime_context import get_parallel, reset_context


@pytest.fixture(autouse=True)
def empty_context() -> Iterator[None]:
    reset_context()
    yield
    left_open = dict(get_parallel()._overrides)
    get_parallel()._overrides.clear()
    reset_context()
    assert left_open == {}, "the test left a parallel scope open"

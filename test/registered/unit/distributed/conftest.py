"""Every test here starts without publication and without groups, and the process is left so."""

from collections.abc import Iterator

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import get_parallel, reset_context


@pytest.fixture(autouse=True)
def empty_process() -> Iterator[None]:
    reset_context()
    yield
    left_open = dict(get_parallel()._overrides)
    get_parallel()._overrides.clear()
    parallel_state.destroy_distributed_environment()
    reset_context()
    assert left_open == {}, "the test left a parallel scope open"

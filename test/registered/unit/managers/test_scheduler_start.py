"""What a scheduler says when its pool is ready: a line that tools parse."""

from __future__ import annotations

import logging

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.scheduler_driver import create_scheduler

register_cpu_ci(est_time=2, suite="unit-cpu")


@pytest.mark.parametrize(("given", "said"), [(32, 32), (-1, -1)])
def test_the_limits_are_logged_once_the_pool_is_there(
    caplog: pytest.LogCaptureFixture, given: int, said: int
) -> None:
    with caplog.at_level(logging.INFO, logger="sglang.srt.managers.scheduler"):
        create_scheduler(chunked_prefill_size=given, max_running_requests=3)
    (line,) = [r.getMessage() for r in caplog.records if "max_total_num_tokens=" in r.getMessage()]
    assert f"chunked_prefill_size={said}, max_prefill_tokens=16384, max_running_requests=3" in line
    assert "context_len=" in line
    assert "available_cpu_mem=" in line

"""The same tokens on every path: cached or not, in chunks, in pages, alone or batched, retracted or not."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
BASE = [(13 * i) % 800 for i in range(90)]
PROMPTS = [
    *([*BASE[:length], 900 + length, *range(5)] for length in (3, 20, 40, 64, 90)),
    [5],
    [(17 * i) % 700 for i in range(130)],
    BASE,
    BASE[:48],
]
LENGTHS = [1, 9, 40, 3, 25, 17, 30, 12, 33]
TRUTH = [expected_output(p, n) for p, n in zip(PROMPTS, LENGTHS)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"page_size": 16},
        {"disable_radix_cache": True},
        {"disable_radix_cache": True, "page_size": 16, "chunked_prefill_size": 16},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 7, "page_size": 16},
        {"chunked_prefill_size": -1, "max_prefill_tokens": 50},
        {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
        {"chunked_prefill_size": 7, "page_size": 16, "enable_mixed_chunk": True, "disable_radix_cache": True},
        {"enable_dynamic_chunking": True},
        {"max_running_requests": 1},
        {"max_running_requests": 4, "schedule_policy": "lpm", "page_size": 4},
        {"pool_tokens": 192, "schedule_conservativeness": 0.0},
        {"pool_tokens": 192, "page_size": 16, "schedule_conservativeness": 0.0, "chunked_prefill_size": 32},
        {"pool_tokens": 192, "page_size": 16, "disable_radix_cache": True, "schedule_conservativeness": 0.1},
    ],
    ids=str,
)
def test_every_configuration_gives_the_same_tokens(new_scheduler: New, fields: dict[str, Any]) -> None:
    scheduler = new_scheduler(**fields)
    for turn in range(2):  # the second turn meets a filled cache
        requests = [
            make_request(f"t{turn}-{i}", p, n, stream=i % 2 == 0)
            for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS))
        ]
        answers = run(scheduler, *requests)
        assert [answers[f"t{turn}-{i}"].ids for i in range(len(PROMPTS))] == TRUTH
    assert scheduler.kv.used() == 0


def test_a_request_is_not_disturbed_by_neighbours_that_come_and_go(new_scheduler: New) -> None:
    scheduler = new_scheduler(page_size=16)
    scheduler.channel.inbox.append(make_request("watched", PROMPTS[6], 60))
    for i in range(200):
        if i % 7 == 0:
            scheduler.channel.inbox.append(make_request(f"n{i}", PROMPTS[i % 5], 1 + i % 11))
        scheduler.step()
        scheduler.invariants.check_slots()
    assert run(scheduler)["watched"].ids == expected_output(PROMPTS[6], 60)


def test_the_same_requests_make_the_same_plan_every_time(new_scheduler: New) -> None:
    """No clock and no hash order takes part in planning."""
    plans = []
    for _ in range(2):
        scheduler = new_scheduler(pool_tokens=256, schedule_policy="lpm", schedule_conservativeness=0.0)
        run(scheduler, *(make_request(f"r{i}", p, n) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS))))
        plans.append((scheduler.worker.batch_sizes, [m.outputs for m in scheduler.channel.sent]))
    assert plans[0] == plans[1]

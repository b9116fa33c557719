"""A step costs the same however many requests wait: what it takes in, walks and matches is counted."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.group_channel import MOST_MESSAGES
from sglang.srt.managers.scheduler_components.planning import prefill_planner
from sglang.srt.managers.scheduler_components.planning.schedule_policy import DEFERRED_PER_STEP
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import checked_step, make_request, run

New = Callable[..., Scheduler]
CROWD = 3000
SHARED = [(11 * i) % 700 for i in range(40)]


class Walked(deque[Req]):
    """A waiting queue that counts the requests it gives out one by one."""

    count = 0

    def __iter__(self) -> Iterator[Req]:
        for req in super().__iter__():
            self.count += 1
            yield req

    def popleft(self) -> Req:
        self.count += 1
        return super().popleft()


def crowded(new_scheduler: New, prompt: Callable[[int], list[int]], **fields: Any) -> Scheduler:
    """A scheduler in which many requests wait and four run."""
    scheduler = new_scheduler(max_running_requests=4, **fields)
    scheduler.channel.inbox.extend(make_request(f"r{i}", prompt(i), 2 + i % 3) for i in range(CROWD))
    while scheduler.channel.inbox:
        scheduler.step()
    scheduler.queues.waiting = Walked(scheduler.queues.waiting)
    return scheduler


def most_walked(scheduler: Scheduler, steps: int = 20) -> int:
    """The most requests of the waiting queue that a step looked at."""
    most = 0
    for _ in range(steps):
        waiting = scheduler.queues.waiting
        before = waiting.count if isinstance(waiting, Walked) else 0
        scheduler.step()
        waiting = scheduler.queues.waiting
        most = max(most, (waiting.count if isinstance(waiting, Walked) else len(waiting)) - before)
    return most


def test_a_crowd_is_let_in_over_several_steps_and_everybody_is_answered(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(make_request("stream", [5], 40))
    checked_step(scheduler)
    prompts = [[i % 900, 1, 2] for i in range(3 * MOST_MESSAGES)]
    scheduler.channel.inbox.extend(make_request(f"r{i}", p, 2) for i, p in enumerate(prompts))
    for taken_in in (1, 2, 3):
        checked_step(scheduler)
        assert scheduler.load.num_received == 1 + taken_in * MOST_MESSAGES
    answers = run(scheduler, check=False)
    assert answers["stream"].ids == expected_output([5], 40)
    assert [answers[f"r{i}"].ids for i in range(len(prompts))] == [expected_output(p, 2) for p in prompts]


def test_admission_walks_no_further_than_the_requests_it_starts(new_scheduler: New) -> None:
    scheduler = crowded(new_scheduler, lambda i: [i % 900, i // 900, 7])
    assert most_walked(scheduler) <= 20
    assert scheduler.queues.waiting


def test_a_step_defers_a_bounded_number_of_requests_that_share_a_prefix(new_scheduler: New) -> None:
    """Each admitted request is the first of its prefix, so all behind it would wait for it."""
    scheduler = crowded(new_scheduler, lambda i: [i // 1000, *SHARED, i], chunked_prefill_size=16)
    matches = 0
    match = scheduler.kv.match

    def counted(req: Req) -> Any:
        nonlocal matches
        matches += 1
        return match(req)

    scheduler.kv.match = counted  # type: ignore[method-assign]
    for _ in range(20):
        matches = 0
        scheduler.step()
        assert matches <= DEFERRED_PER_STEP + 8


def test_building_the_queue_anew_each_step_is_noticed(
    new_scheduler: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(waiting: deque[Req], taken: set[int]) -> None:
        kept = [req for req in waiting if req.arrival not in taken]
        waiting.clear()
        waiting.extend(kept)

    monkeypatch.setattr(prefill_planner, "take_out", planted)
    scheduler = crowded(new_scheduler, lambda i: [i % 900, i // 900, 7])
    assert most_walked(scheduler) > CROWD / 2

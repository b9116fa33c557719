"""Queue order, waiting for a shared prefix, and the estimate of growth, each by itself."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections import deque
from collections.abc import Callable

import pytest

from sglang.srt.batch.req import Req
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.planning import schedule_policy
from sglang.srt.managers.scheduler_components.planning.schedule_policy import (
    NewTokenRatio,
    PrefillBudget,
    count_deferral,
    queue_order,
    requeue,
    waits_for,
)
from sglang.srt.messages.io_struct import AbortReq
from sglang.test.fakes.fake_channel import answers
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]


def req(arrival: int, prompt: list[int] | None = None, max_new_tokens: int = 8) -> Req:
    message = make_request(f"r{arrival}", prompt or [arrival, 1, 2], max_new_tokens)
    return Req(message, SamplingState(message.sampling_params, 0, ()), max_new_tokens, arrival)


def test_fcfs_keeps_the_order_of_arrival_and_lpm_takes_the_longest_cached_prefix() -> None:
    waiting = deque(req(i) for i in range(4))
    matched = {0: 0, 1: 5, 2: 9, 3: 5}
    assert [r.arrival for r in queue_order(waiting, "fcfs", lambda r: matched[r.arrival], 0)] == [0, 1, 2, 3]
    assert [r.arrival for r in queue_order(waiting, "lpm", lambda r: matched[r.arrival], 0)] == [2, 1, 3, 0]


def test_lpm_lets_nobody_be_passed_over_for_ever() -> None:
    waiting = deque(req(i) for i in range(3))
    waiting[2].num_retractions = 1
    started = schedule_policy.PASSED_OVER_LIMIT + 1
    waiting[1].passed_over_from = started
    order = queue_order(waiting, "lpm", lambda r: [0, 50, 0][r.arrival], started)
    assert [r.arrival for r in order] == [0, 2, 1]


def test_lpm_falls_back_to_the_order_of_arrival_for_a_long_queue() -> None:
    waiting = deque(req(i) for i in range(schedule_policy.LPM_MAX_QUEUE + 1))

    def never(_: Req) -> int:
        raise AssertionError("a long queue must not be matched")

    assert [r.arrival for r in queue_order(waiting, "lpm", never, 0)] == list(range(len(waiting)))


def test_a_request_without_a_cached_prefix_is_not_starved_by_a_stream_of_hits(new_scheduler: New) -> None:
    scheduler = new_scheduler(schedule_policy="lpm", max_running_requests=1)
    popular = list(range(100, 140))
    run(scheduler, make_request("fill", popular, 1))
    scheduler.channel.inbox.append(make_request("cold", list(range(500, 540)), 1))
    for step in range(300):
        for i in range(2):
            scheduler.channel.inbox.append(make_request(f"hit{step}-{i}", [*popular, step, i], 1))
        scheduler.step()
        if len(scheduler.queues.waiting) > 100:
            scheduler.queues.waiting = deque(list(scheduler.queues.waiting)[:60])
        if "cold" in answers(scheduler.channel):
            break
    assert "cold" in answers(scheduler.channel) and step > 10


def test_retracted_requests_return_to_the_head_in_order_of_arrival() -> None:
    waiting = deque([req(7), req(8)])
    requeue(waiting, [req(3), req(1), req(2)])
    assert [r.arrival for r in waiting] == [1, 2, 3, 7, 8]


def test_a_request_waits_only_for_a_prefix_worth_waiting_for() -> None:
    base = list(range(100))
    leader = req(0, base)
    assert waits_for(req(1, [*base[:40], 999]), 0, [leader], 1) is leader
    assert waits_for(req(1, [*base[:40], 999]), 30, [leader], 1) is None, "10 new tokens are not worth it"
    assert waits_for(req(1, [*base[:40], 999]), 0, [leader], 64) is None, "less than a page"
    assert waits_for(req(1, [5, *base]), 0, [leader], 1) is None
    assert waits_for(req(1, base), 0, [], 1) is None
    other_tenant = req(1, base)
    other_tenant.extra_key = "salt"
    assert waits_for(other_tenant, 0, [leader], 1) is None


def test_a_request_does_not_wait_for_ever_new_leaders() -> None:
    follower = req(0)
    for i in range(schedule_policy.DEFERRALS_LIMIT):
        assert count_deferral(follower, req(i + 1)) and count_deferral(follower, req(i + 1))
    assert not count_deferral(follower, req(99))


def test_a_budget_cuts_prompts_or_takes_them_whole() -> None:
    cutting = PrefillBudget(tokens=10, requests=2, cuts_prompts=True)
    assert cutting.take(25, first=True) == 10
    whole = PrefillBudget(tokens=10, requests=2, cuts_prompts=False)
    assert whole.take(25, first=True) == 25 and whole.take(25, first=False) == 0
    whole.spend(4)
    whole.spend(4)
    assert whole.take(1, first=False) == 0


def test_the_ratio_falls_while_all_goes_well_and_jumps_after_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    first = ratio.value
    for _ in range(2000):
        ratio.decoded()
    assert ratio.value == pytest.approx(first * 0.14)
    running = [req(i, max_new_tokens=100) for i in range(2)]
    for r in running:
        r.output_ids = list(range(30))
    ratio.retracted(running)
    assert ratio.value == pytest.approx((60 + 40) / 200)
    assert ratio.expected(running[0]) == 35
    ratio.reset()
    assert ratio.value == first


def test_one_request_with_a_huge_limit_does_not_reserve_the_world() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.expected(req(0, max_new_tokens=10**8)) <= 4096


def test_a_queue_that_found_no_room_is_not_matched_in_every_step(new_scheduler: New) -> None:
    """Until somebody comes or goes the answer would be the same; but whoever goes makes room at once."""
    scheduler = new_scheduler(pool_tokens=300, schedule_policy="lpm")
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *range(50)], 120) for i in range(2))
    scheduler.step()
    scheduler.channel.inbox.extend(make_request(f"w{i}", [i, *range(300, 500)], 120) for i in range(20))
    scheduler.step()
    matches: list[Req] = []
    match = scheduler.kv.match
    scheduler.kv.match = lambda one: (matches.append(one), match(one))[1]
    for _ in range(32):
        scheduler.step()
    assert len(scheduler.queues.waiting) == 20 and len(matches) <= 5 * 21
    scheduler.channel.inbox.append(AbortReq(rid="r"))
    scheduler.step()
    assert len(scheduler.queues.waiting) == 19

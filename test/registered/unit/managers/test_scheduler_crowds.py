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
from sglang.srt.messages.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    Message,
    ShutdownReq,
    decode,
    decode_head,
    encode,
)
from sglang.srt.processes.arrivals import Arrivals
from sglang.test.fakes.fake_channel import FakeChannel, answers
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


class WireChannel(FakeChannel):
    """Takes messages in as a rank's end of the wire does, from their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = Arrivals(decode, decode_head)

    def recv_all(self, most: int | None = None) -> list[Message]:
        return self._arrivals.take(iter(self._receive, None), most)

    def _receive(self) -> bytes | None:
        return encode(self.inbox.popleft()) if self.inbox else None


def steps_to_answer(
    scheduler: Scheduler, channel: FakeChannel, call: Message, is_done: Callable[[], bool]
) -> int:
    """Behind 10,000 requests that have just arrived."""
    scheduler.channel = scheduler.group._channel = channel
    channel.inbox.extend(make_request(f"r{i}", [i % 900, 1], 2) for i in range(10_000))
    channel.inbox.append(call)
    for steps in range(1, 100):
        scheduler.step()
        if is_done():
            return steps
    raise AssertionError("no answer")


def has_answered(channel: FakeChannel, kind: type[Message]) -> bool:
    return any(isinstance(message, kind) for message in channel.sent)


@pytest.mark.parametrize("channel_kind, at_once", [(WireChannel, True), (FakeChannel, False)])
def test_behind_a_crowd_of_arriving_requests_control_messages_are_answered_at_once(
    new_scheduler: New, channel_kind: type[FakeChannel], at_once: bool
) -> None:
    """In the order of arrival (False) they would come after forty steps."""

    def steps(call: Message, is_done: Callable[[Scheduler, FakeChannel], bool]) -> int:
        scheduler, channel = new_scheduler(max_running_requests=4), channel_kind()
        return steps_to_answer(scheduler, channel, call, lambda: is_done(scheduler, channel))

    taken = [
        steps(ShutdownReq(), lambda scheduler, channel: scheduler._stopping),
        steps(GetInternalStateReq(call_id=1), lambda _, c: has_answered(c, GetInternalStateReqOutput)),
        steps(FlushCacheReqInput(call_id=1), lambda _, c: has_answered(c, FlushCacheReqOutput)),
        steps(AbortReq(rid="r9999", exact=True), lambda _, channel: "r9999" in answers(channel)),
    ]
    assert max(taken) <= 2 if at_once else min(taken) > 30


def test_a_cache_is_not_said_to_be_flushed_while_a_crowd_arrives(new_scheduler: New) -> None:
    scheduler, channel = new_scheduler(), WireChannel()
    scheduler.channel = scheduler.group._channel = channel
    channel.inbox.extend(make_request(f"r{i}", [i % 900, 1], 2) for i in range(1000))
    channel.inbox.append(FlushCacheReqInput(call_id=1))
    scheduler.step()
    (answer,) = [message for message in channel.sent if isinstance(message, FlushCacheReqOutput)]
    assert not answer.success and "wait" in answer.message


@pytest.mark.parametrize("each_at_once", [False, True])
def test_many_aborts_of_a_step_walk_the_waiting_queue_once(
    new_scheduler: New, monkeypatch: pytest.MonkeyPatch, each_at_once: bool
) -> None:
    """Carried out one by one (True) each of them would walk it."""
    scheduler = crowded(new_scheduler, lambda i: [i % 900, i // 900, 7])
    named = [f"r{i}" for i in range(100, 1100, 5)]
    assert len(named) < MOST_MESSAGES
    scheduler.channel.inbox.extend(AbortReq(rid=rid, exact=True) for rid in named)
    walked, receiver = 0, scheduler.receiver
    if each_at_once:
        abort = receiver.abort
        monkeypatch.setattr(receiver, "abort", lambda message: (abort(message), receiver.end_aborted()))
    take_out = receiver._take_out

    def counted(is_named: Callable[[Req], bool], reason: Any) -> None:
        nonlocal walked
        walked += len(scheduler.queues.waiting)
        take_out(is_named, reason)

    monkeypatch.setattr(receiver, "_take_out", counted)
    scheduler.step()
    got = answers(scheduler.channel)
    assert all(got[rid].finish_reason is not None for rid in named)
    assert walked > 10 * CROWD if each_at_once else 0 < walked <= CROWD

"""Aborts: at every stage, by prefix or exactly, once and with the ids so far; then the pool is empty."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import group_channel
from sglang.srt.messages.io_struct import AbortReq
from sglang.test.fakes.fake_channel import answers
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPT = [(7 * i) % 900 for i in range(100)]


def assert_empty(scheduler: Scheduler) -> None:
    assert scheduler.queues.is_idle
    state = scheduler.load.state(0.0)
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_used_tokens"]) == (0, 0, 0)
    scheduler.invariants.check_idle()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("steps", [0, 1, 3, 7, 8, 20], ids=lambda s: f"after{s}")
def test_an_abort_at_any_stage_returns_once_with_the_partial_ids(
    new_scheduler: New, page_size: int, steps: int
) -> None:
    """100 tokens in chunks of 16: steps 1-6 are in the middle of the prompt, step 7 draws the first token."""
    scheduler = new_scheduler(page_size=page_size, chunked_prefill_size=16)
    scheduler.channel.inbox.append(make_request("r", PROMPT, 64, stream=True))
    for _ in range(steps):
        scheduler.step()
    answer = run(scheduler, AbortReq(rid="r"))["r"]
    assert answer.finish_reason is not None and answer.finish_reason.type == "abort"
    assert answer.finish_reason.status_code is None, "an abort by the user is no error"
    assert answer.ids == expected_output(PROMPT, 64)[: max(steps - 6, 0)]
    assert_empty(scheduler)
    assert run(scheduler, make_request("next", PROMPT, 5))["next"].ids == expected_output(PROMPT, 5)


def test_a_waiting_request_is_aborted_without_a_forward(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=1)
    scheduler.channel.inbox.extend([make_request("a", PROMPT, 10), make_request("b", [1, 2], 10)])
    scheduler.step()
    got = run(scheduler, AbortReq(rid="b"))
    assert (
        got["b"].ids == [] and got["b"].finish_reason is not None and got["b"].finish_reason.type == "abort"
    )
    assert got["a"].ids == expected_output(PROMPT, 10)
    assert max(scheduler.worker.batch_sizes) == 1
    assert_empty(scheduler)


def test_a_retracted_request_that_waits_returns_what_it_had(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0)
    prompts = [PROMPT[:30], PROMPT[30:60]]
    scheduler.channel.inbox.extend(make_request(f"r{i}", p, 60) for i, p in enumerate(prompts))
    while not scheduler.queues.waiting or not scheduler.queues.waiting[0].num_retractions:
        scheduler.step()
    victim = scheduler.queues.waiting[0]
    place, produced = int(victim.rid[1]), len(victim.output_ids)
    got = run(scheduler, AbortReq(rid=victim.rid))
    assert produced > 0 and got[victim.rid].ids == expected_output(prompts[place], 60)[:produced]
    assert got[f"r{1 - place}"].ids == expected_output(prompts[1 - place], 60)
    assert_empty(scheduler)


def test_a_rid_is_a_prefix_unless_it_is_exact(new_scheduler: New) -> None:
    for exact, ended in ((False, {"a1", "a10", "a1-0"}), (True, {"a1"})):
        scheduler = new_scheduler()
        scheduler.channel.inbox.extend(
            make_request(rid, PROMPT, 20) for rid in ("a1", "a10", "a1-0", "a2", "ba1")
        )
        scheduler.step()
        got = run(scheduler, AbortReq(rid="a1", exact=exact))
        assert {rid for rid, a in got.items() if a.finish_reason and a.finish_reason.type == "abort"} == ended


def test_an_empty_rid_and_an_unknown_one_abort_nothing_and_all_means_all(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=2)
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *PROMPT], 20) for i in range(4))
    scheduler.step()
    scheduler.channel.inbox.extend([AbortReq(rid=""), AbortReq(rid="zzz"), AbortReq(rid="", exact=True)])
    scheduler.step()
    assert scheduler.queues.num_started == 2 and len(scheduler.queues.waiting) == 2
    got = run(scheduler, AbortReq(abort_all=True))
    assert len(got) == 4 and all(a.finish_reason and a.finish_reason.type == "abort" for a in got.values())
    assert_empty(scheduler)


def test_two_ghosts_free_their_place_for_the_third_at_once(new_scheduler: New) -> None:
    """A client that hung up must not keep its slot until its token limit."""
    scheduler = new_scheduler(max_running_requests=2)
    scheduler.channel.inbox.extend(
        make_request(f"g{i}", [i, *PROMPT], 1000, ignore_eos=True) for i in range(2)
    )
    for _ in range(3):
        scheduler.step()
    scheduler.channel.inbox.extend(
        [AbortReq(rid="g0", exact=True), AbortReq(rid="g1", exact=True), make_request("third", PROMPT, 3)]
    )
    for _ in range(3):
        scheduler.step()
    assert answers(scheduler.channel)["third"].ids == expected_output(PROMPT, 3)
    assert_empty(scheduler)


def test_what_an_aborted_prompt_had_computed_is_reused(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=16)
    scheduler.channel.inbox.append(make_request("r", PROMPT, 4))
    for _ in range(3):
        scheduler.step()
    run(scheduler, AbortReq(rid="r"))
    assert run(scheduler, make_request("again", PROMPT, 4))["again"].cached_tokens == 48


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_a_request_ends_when_its_time_in_the_queue_or_in_the_batch_is_over(
    new_scheduler: New, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = {"waiting": envs.SGLANG_REQ_WAITING_TIMEOUT, "running": envs.SGLANG_REQ_RUNNING_TIMEOUT}[stage]
    now = [100.0]
    monkeypatch.setattr(group_channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with variable.override(5.0):
        scheduler = new_scheduler(max_running_requests=1)
    scheduler.channel.inbox.extend([make_request("running", PROMPT, 9), make_request("waiting", PROMPT, 9)])
    for second in (100.0, 104.0, 107.0):
        now[0] = second
        scheduler.step()
    ended = {rid: a.finish_reason for rid, a in answers(scheduler.channel).items() if a.finish_reason}
    assert set(ended) == ({"waiting"} if stage == "waiting" else set())
    now[0] = 110.0
    scheduler.step()
    ended = {rid: a.finish_reason for rid, a in answers(scheduler.channel).items() if a.finish_reason}
    assert list(ended) == [stage] and ended[stage] is not None
    assert ended[stage].status_code == 503 and "5 s" in (ended[stage].message or "")


@pytest.mark.parametrize(
    "abort", [AbortReq(rid="x", exact=True), AbortReq(rid="x"), AbortReq(abort_all=True)]
)
def test_in_one_step_an_abort_ends_what_came_before_it_and_not_what_came_after(
    new_scheduler: New, abort: AbortReq
) -> None:
    """Aborts of a step are carried out together; what comes behind one, under the same name, is not meant."""
    scheduler = new_scheduler(max_running_requests=1)
    again = make_request("x2", [3, 4], 5) if not abort.exact else make_request("y", [3, 4], 5)
    scheduler.channel.inbox.extend([make_request("x", PROMPT, 5), abort, again])
    got = run(scheduler)
    assert got["x"].finish_reason is not None and got["x"].finish_reason.type == "abort"
    assert got[again.rid].ids == expected_output([3, 4], 5)


def test_aborts_make_room_in_the_queue_for_what_comes_behind_them_in_the_same_step(
    new_scheduler: New,
) -> None:
    scheduler = new_scheduler(max_running_requests=1, max_queued_requests=2)
    scheduler.channel.inbox.append(make_request("runs", [1], 30))
    scheduler.step()
    waiting = [make_request(f"w{i}", [i, 2], 5) for i in range(2)]
    scheduler.channel.inbox.extend(
        [
            *waiting,
            AbortReq(rid="w0", exact=True),
            make_request("new", [9, 2], 5),
            make_request("late", [8], 5),
        ]
    )
    got = run(scheduler)
    assert got["new"].ids == expected_output([9, 2], 5)
    assert got["late"].finish_reason is not None and got["late"].finish_reason.status_code == 503

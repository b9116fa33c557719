"""The vote on when prompts start: together, after a bounded wait, or at once where a pool is nearly empty."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import logging
from typing import Any

import pytest

from sglang.srt.managers.scheduler_components.planning.prefill_delayer import PrefillDelayer, Vote
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
from sglang.test.fakes.fake_group import FakeGroup, Row
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request, run
from sglang.test.test_utils import published_topology

NOBODY = Vote(0, 0, 0)
READY = Vote(1, 0, 0)


def ask(delayer: PrefillDelayer, mine: bool, *others: Vote, usage: float = 0.9, each: int = 1) -> bool:
    """The answer on rank 0 of a tensor group whose replicas have `each` ranks; `others` are the others'."""

    def everyone(row: Row) -> list[Row]:
        return [row] * each + [list(vote) for vote in others for _ in range(each)]

    replicas = 1 + len(others)
    width = replicas * each
    with (
        published_topology(
            tp_size=width, dp_size=replicas, enable_dp_attention=True, ranks={"world_rank": 0}
        ),
        get_parallel().override(tp_group=FakeGroup(width, everyone=everyone)),
    ):
        return delayer.may_start(can_start=mine, is_in_prompt=False, token_usage=usage)


@pytest.mark.parametrize("each", [1, 2])
def test_prompts_wait_until_all_replicas_can_start_one(each: int) -> None:
    """Sized by the tensor group: with two ranks a replica the gather has twice the rows, not the answer."""
    delayer = PrefillDelayer(max_passes=30, low_watermark=None)
    assert not ask(delayer, True, NOBODY, each=each)
    assert not ask(delayer, False, READY, each=each)
    assert ask(delayer, True, READY, each=each)
    assert ask(delayer, False, NOBODY, each=each)
    assert delayer.num_delayed_steps == 2


@pytest.mark.parametrize("max_passes", [0, 1, 3])
def test_the_wait_is_bounded_and_counted_anew_after_it(max_passes: int) -> None:
    delayer = PrefillDelayer(max_passes=max_passes, low_watermark=None)
    answers = [ask(delayer, True, NOBODY) for _ in range(2 * max_passes + 2)]
    assert answers == ([False] * max_passes + [True]) * 2


def test_a_waiting_replica_with_a_nearly_empty_pool_is_not_held_back() -> None:
    delayer = PrefillDelayer(max_passes=30, low_watermark=0.5)
    assert ask(delayer, True, NOBODY, usage=0.4)
    assert not ask(delayer, True, NOBODY, usage=0.5)
    assert not ask(delayer, False, READY, usage=0.1), "the empty pool of a replica that has no prompt"
    assert ask(delayer, False, Vote(1, 0, 1))


def test_a_prompt_that_is_partly_computed_lets_the_others_in() -> None:
    assert ask(PrefillDelayer(max_passes=30, low_watermark=None), True, Vote(0, 1, 0), NOBODY)


def test_without_attention_data_parallelism_it_is_accepted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        scheduler = create_scheduler(enable_prefill_delayer=True)
    assert [
        r.getMessage() for r in caplog.records if "enable_prefill_delayer has no effect" in r.getMessage()
    ]
    assert get_schedule().enable_prefill_delayer is False
    assert "prefill_delayer" in [entry.source for entry in get_context().overrides_log()]
    assert run(scheduler, make_request("a", [1, 2, 3], 4))["a"].ids == expected_output([1, 2, 3], 4)
    caplog.clear()
    create_scheduler()
    assert "enable_prefill_delayer" not in caplog.text


def test_the_flags_reach_the_delayer() -> None:
    with published_topology(
        tp_size=2,
        dp_size=2,
        enable_dp_attention=True,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=7,
        prefill_delayer_token_usage_low_watermark=0.25,
        ranks={"world_rank": 0},
    ):
        delayer = PrefillDelayer.from_published()
        assert delayer is not None and (delayer._max_passes, delayer._low_watermark) == (7, 0.25)


def test_a_held_back_replica_decodes_and_goes_on_with_a_prompt_it_began() -> None:
    """Nobody decodes over a prompt that is partly computed: its room is promised."""
    votes: dict[str, Any] = {"other": NOBODY}

    def everyone(mine: Row) -> list[Row]:
        if len(mine) == len(NOBODY):
            return [mine, list(votes["other"])]
        return [mine, [0] * len(mine)]

    scheduler = create_scheduler(
        groups={"tp_group": FakeGroup(2, everyone=everyone), "attn_tp_group": FakeGroup(1)},
        tp_size=2,
        dp_size=2,
        enable_dp_attention=True,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=4,
        chunked_prefill_size=16,
    )
    votes["other"] = READY
    scheduler.channel.inbox.append(make_request("a", list(range(10)), 40))
    scheduler.step()
    votes["other"] = NOBODY
    scheduler.channel.inbox.append(make_request("b", list(range(100, 150)), 40))
    for _ in range(4):
        scheduler.step()
    assert scheduler.worker.forwards == {"extend": 1, "decode": 4}
    for _ in range(4):
        scheduler.step()
    assert scheduler.worker.forwards == {"extend": 5, "decode": 4}, "50 tokens in pieces of 16, uninterrupted"
    while scheduler.step():
        pass
    assert scheduler._delayer is not None and scheduler._delayer.num_delayed_steps == 4


def test_a_plan_without_starts_goes_on_with_a_prompt_and_admits_nobody_beside_it() -> None:
    scheduler = create_scheduler(chunked_prefill_size=16)
    scheduler.channel.inbox.append(make_request("long", list(range(20)), 4))
    scheduler.step()
    scheduler.receiver.accept(make_request("short", [7, 7], 4), 0.0)
    plan = scheduler.planner.plan(now=0.0, may_start=False, may_decode=lambda has_prompt: not has_prompt)
    assert plan.batch is not None and [req.rid for req in plan.batch.reqs] == ["long"]
    assert [req.rid for req in scheduler.queues.waiting] == ["short"]

"""What attention-DP replicas agree on once a step, seen from one of them; the others are given."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.batch.forward_batch import DpStep
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.dp_attn import DpAttnSync, ReplicaFacts
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    DispatchedReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ShutdownReq,
)
from sglang.srt.runtime_context import get_parallel, reset_context
from sglang.test.fakes.fake_group import FakeGroup, Row
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request

PROMPT = [(7 * i) % 900 for i in range(50)]
TWO = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
NOTHING = ReplicaFacts(*[0] * len(ReplicaFacts._fields))


def busy(**facts: int) -> ReplicaFacts:
    """A replica that runs one request."""
    return NOTHING._replace(**{"has_requests": 1, "num_requests": 1, "slots_per_request": 1, **facts})


class Others:
    """The rest of a tensor group of two replicas of one rank each; `facts` is what the other says."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.facts = NOTHING
        self.heard: list[ReplicaFacts] = []

    def __call__(self, mine: Row) -> list[Row]:
        if len(mine) == len(NOTHING):
            self.heard.append(ReplicaFacts(*mine))
            other = list(self.facts)
        else:  # the forward of the fake worker: tokens and logit rows
            other = [self.facts.num_tokens, self.facts.num_logit_rows]
        return [mine, other] if self.rank == 0 else [other, mine]


def replica(rank: int = 0, **fields: Any) -> tuple[Scheduler, Others]:
    others = Others(rank)
    group = FakeGroup(2, rank, everyone=others)
    scheduler = create_scheduler(
        groups={"tp_group": group, "attn_tp_group": FakeGroup(1)}, world_rank=rank, **{**TWO, **fields}
    )
    return scheduler, others


def test_a_replica_with_work_tells_its_sizes_and_runs_with_those_of_all() -> None:
    scheduler, others = replica(chunked_prefill_size=32)
    others.facts = busy(num_requests=5, num_tokens=5, num_logit_rows=5)
    scheduler.channel.inbox.append(make_request("a", PROMPT, 3))
    assert scheduler.step()
    assert others.heard[0] == busy(received=1, num_tokens=32, is_extend=1)
    assert scheduler.worker.steps == [DpStep([32, 5], [0, 5], is_extend=True, num_requests=[1, 5])]
    scheduler.step(), scheduler.step()
    assert scheduler.worker.steps[1:] == [
        DpStep([18, 5], [1, 5], is_extend=True, num_requests=[1, 5]),
        DpStep([1, 5], [1, 5], is_extend=False, num_requests=[1, 5]),
    ]


def test_an_idle_replica_takes_the_step_with_zero_rows_and_goes_on_while_others_have_requests() -> None:
    scheduler, others = replica(rank=1)
    others.facts = busy(num_tokens=7, num_logit_rows=1, is_extend=1)
    assert scheduler.step()
    assert scheduler.worker.forwards == {"extend": 0, "decode": 0, "idle": 1}
    assert scheduler.worker.steps == [DpStep([7, 0], [1, 0], is_extend=True, num_requests=[1, 0])]
    assert scheduler.load.state(0.5)["forward_ct_idle"] == 1


def test_nobody_runs_when_nobody_has_a_token() -> None:
    scheduler, others = replica()
    others.facts = NOTHING._replace(has_requests=1)
    assert scheduler.step(), "somebody has requests: the loop must not rest"
    assert scheduler.worker.batch_sizes == []
    others.facts = NOTHING
    assert not scheduler.step()


def test_the_answers_do_not_depend_on_the_others_and_name_the_replica() -> None:
    scheduler, others = replica(rank=1)
    scheduler.channel.inbox.append(make_request("a", PROMPT, 6))
    while scheduler.step():
        tokens = len(others.heard) % 3
        others.facts = busy(num_tokens=tokens) if tokens else NOTHING
        if len(others.heard) > 12:
            others.facts = NOTHING
    sent = [message for message in scheduler.channel.sent if isinstance(message, BatchTokenIDOutput)]
    assert [token for message in sent for news in message.outputs for token in news.new_ids] == (
        expected_output(PROMPT, 6)
    )
    assert {message.dp_rank for message in sent} == {1}


def test_a_flush_and_the_counters_are_those_of_the_replica() -> None:
    scheduler, others = replica(rank=1)
    others.facts = busy(num_tokens=3)
    scheduler.channel.inbox.extend([make_request("a", PROMPT, 2), make_request("b", [5000], 2)])
    for _ in range(3):
        scheduler.step()
    scheduler.channel.inbox.extend([FlushCacheReqInput(call_id=1), GetInternalStateReq(call_id=2)])
    scheduler.step()
    flushed, answer = scheduler.channel.sent[-2:]
    assert isinstance(flushed, FlushCacheReqOutput) and isinstance(answer, GetInternalStateReqOutput)
    assert (flushed.success, flushed.dp_rank, answer.dp_rank) == (True, 1, 1)
    state = answer.state
    assert state["dp_rank"] == 1
    assert (state["num_requests_received"], state["num_requests_finished"]) == (2, 2)
    assert state["num_generated_tokens"] == 2


@pytest.mark.parametrize("who", ["this", "other"])
def test_all_leave_in_the_turn_in_which_one_is_told_to(who: str) -> None:
    scheduler, others = replica()
    scheduler.channel.inbox.append(make_request("a", PROMPT, 40))
    scheduler.step()
    if who == "this":
        scheduler.channel.inbox.append(ShutdownReq())
    else:
        others.facts = NOTHING._replace(stopping=1)
    assert not scheduler.step() and scheduler._stopping
    assert others.heard[-1].stopping == (who == "this")
    assert scheduler.worker.forwards == {"extend": 1, "decode": 0}, "no forward in the last step"


class Resting:
    """Runs the loop of one replica and notes the steps after which it rested."""

    def __init__(self, rank: int) -> None:
        self.scheduler, self.others = replica(rank)
        self.rests: list[int] = []
        self.scheduler.channel.wait = lambda seconds: self.rests.append(len(self.others.heard))

    def step(self, *messages: Any, received: int = 0) -> bool:
        """One step of the loop in which the other replica says `received`; True when it rested after it."""
        self.others.facts = NOTHING._replace(received=received)
        self.scheduler.channel.inbox.extend(messages)
        before = len(self.rests)
        step = self.scheduler.step

        def only_once() -> bool:
            going_on = step()
            self.scheduler.step = self.leave
            return going_on

        self.scheduler.step = only_once
        self.scheduler.run_event_loop()
        self.scheduler.step = step
        self.scheduler._stopping = False
        return len(self.rests) > before

    def leave(self) -> bool:
        self.scheduler._stopping = True
        return False


def test_only_the_first_replica_rests() -> None:
    assert Resting(0).step()
    assert not Resting(1).step()


def test_nobody_rests_while_a_message_is_on_its_way_to_another_replica() -> None:
    """The other replica waits in the gather for this one; resting would start its request a second late."""
    loop = Resting(0)
    assert not loop.step(DispatchedReq(counts=[0, 1]), received=0)
    assert not loop.step(received=0)
    assert loop.step(received=1)
    assert not loop.step(DispatchedReq(counts=[0, 2]), received=1)
    assert loop.step(DispatchedReq(counts=[0, 3]), received=3)
    # A dispatch note counts for nothing itself, every other message does.
    loop.step(GetInternalStateReq(call_id=1), DispatchedReq(counts=[1, 3]), received=3)
    assert loop.others.heard[-1].received == 1


def test_without_the_note_the_first_replica_would_have_rested() -> None:
    assert Resting(0).step(received=0)


def test_a_dispatch_note_for_another_number_of_replicas_is_an_error() -> None:
    scheduler, _ = replica()
    scheduler.channel.inbox.append(DispatchedReq(counts=[1]))
    with pytest.raises(RuntimeError, match="speaks of 1 replicas, and this tensor group has 2"):
        scheduler.step()


def test_a_dispatch_note_without_attention_data_parallelism_is_an_error() -> None:
    scheduler = create_scheduler()
    scheduler.channel.inbox.append(DispatchedReq(counts=[1]))
    with pytest.raises(RuntimeError, match="DispatchedReq"):
        scheduler.step()


def gather_of_four(everyone: Callable[[Row], list[Row]]) -> None:
    """One step seen from rank 0 of two replicas of two ranks each."""
    group = FakeGroup(4, everyone=everyone)
    create_scheduler(groups={"tp_group": group, "attn_tp_group": FakeGroup(2)}, **{**TWO, "tp_size": 4})
    DpAttnSync().agree(stopping=False, has_requests=True, batch=None)


def test_ranks_of_one_replica_that_decided_differently_are_named_with_their_values() -> None:
    other = list(NOTHING._replace(received=4, num_tokens=5, plan=17))
    gather_of_four(lambda mine: [mine, mine, other, other])
    wrong = list(NOTHING._replace(received=4, num_tokens=6, plan=18))
    with pytest.raises(
        RuntimeError, match=r"TP ranks 2 and 3 .*replica 1\).*num_tokens 5 and 6, plan 17 and 18"
    ):
        gather_of_four(lambda mine: [mine, mine, other, wrong])


def test_peers_with_the_same_sizes_and_other_slots_are_told_apart() -> None:
    """Sizes alone would let them run: a peer that reads other slots gives wrong answers, not an error."""
    rows: list[Row] = []
    for shift in (0, 1):
        reset_context()
        group = FakeGroup(4, everyone=lambda mine: rows.append(mine) or [mine] * 4)
        scheduler = create_scheduler(
            groups={"tp_group": group, "attn_tp_group": FakeGroup(2)}, **{**TWO, "tp_size": 4}
        )
        if shift:
            scheduler.kv.allocator.alloc_extend(0, 2, 0)
        scheduler.channel.inbox.append(make_request("a", PROMPT, 3))
        if get_parallel().attn_tp_rank == 0:
            scheduler.step()
    first, second = (ReplicaFacts(*row) for row in rows if len(row) == len(NOTHING))
    assert first.num_tokens == second.num_tokens == 50 and first.plan != second.plan

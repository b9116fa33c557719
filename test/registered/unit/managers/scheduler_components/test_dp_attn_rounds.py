"""Attention DP with a draft: a step has prompts or verify rounds. One replica sees it, the other is given."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from typing import Any

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.dp_attn import MAX_PROMPT_STEPS, ReplicaFacts
from sglang.srt.managers.scheduler_components.planning.prefill_delayer import Vote
from sglang.srt.messages.io_struct import AbortReq, ShutdownReq
from sglang.test.fakes.fake_channel import FakeChannel, answers
from sglang.test.fakes.fake_group import FakeGroup, Row
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request

PROMPT = [(7 * i) % 900 for i in range(50)]
WIDTH = 5
NOTHING = ReplicaFacts(*[0] * len(ReplicaFacts._fields))
PROMPTS_TOO = NOTHING._replace(
    has_requests=1, num_requests=2, num_tokens=9, num_logit_rows=2, is_extend=1, slots_per_request=1
)
ROUND_TOO = NOTHING._replace(
    has_requests=1, num_requests=3, num_tokens=3, num_logit_rows=3, slots_per_request=WIDTH
)


class Other:
    """The other of two replicas of one rank each: what it is about to do, and every gather in order.

    A row of one number is the vote on prompts, one of three the delayer's, one of two a phase of the forward:
    its sizes follow from `facts`.
    """

    def __init__(self) -> None:
        self.facts = NOTHING
        self.gathers: list[str] = []
        self.votes: list[int] = []
        self.mine: list[ReplicaFacts] = []
        self._phases: list[Row] = []

    def __call__(self, mine: Row) -> list[Row]:
        if len(mine) == 1:
            self.gathers.append("vote")
            self.votes.append(int(mine[0] == 1))
            return [mine, [self.facts.is_extend]]
        if len(mine) == len(Vote._fields):
            self.gathers.append("delayer")
            return [mine, [self.facts.is_extend, 0, 0]]
        if len(mine) == len(NOTHING):
            self.gathers.append("facts")
            self.mine.append(ReplicaFacts(*mine))
            facts, widths = self.facts, [f.slots_per_request for f in (self.facts, self.mine[-1])]
            rows = [1, min(width for width in widths if width)] if any(widths) else []
            sizes = [facts.num_tokens, facts.num_logit_rows]
            self._phases = [sizes, *([facts.num_requests * width] * 2 for width in rows)]
            return [mine, list(facts)]
        self.gathers.append("forward")
        return [mine, self._phases.pop(0)]


def replica(**fields: Any) -> tuple[Scheduler, Other]:
    other = Other()
    scheduler = create_scheduler(
        groups={"tp_group": FakeGroup(2, everyone=other), "attn_tp_group": FakeGroup(1)},
        **{"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "slots_per_step": WIDTH, **fields},
    )
    return scheduler, other


def running(scheduler: Scheduler, other: Other, **fields: Any) -> None:
    """One request of the replica has its first token."""
    other.facts = NOTHING
    scheduler.channel.inbox.append(make_request("a", PROMPT, 60, **fields))
    scheduler.step()
    assert scheduler.worker.forwards == {"extend": 1, "decode": 0}


def test_a_replica_without_a_prompt_is_idle_while_another_computes_one() -> None:
    scheduler, other = replica()
    running(scheduler, other)
    other.facts = PROMPTS_TOO
    for _ in range(3):
        assert scheduler.step()
    assert scheduler.worker.forwards == {"extend": 1, "decode": 0, "idle": 3}
    (req,) = scheduler.queues.running
    assert req.reserved_len == req.kv_len == 50, "nothing was planned for it"
    step = scheduler.worker.steps[-1]
    assert step is not None and step.is_extend and step.num_requests == [0, 2]
    other.facts = ROUND_TOO
    scheduler.step()
    assert scheduler.worker.forwards["decode"] == 1 and scheduler.worker.widths == [WIDTH]
    step = scheduler.worker.steps[-1]
    assert step is not None and not step.is_extend
    assert (step.num_requests, step.num_tokens, step.slots_per_request) == ([1, 3], [1, 3], WIDTH)
    assert other.votes == [1, 0, 0, 0, 0]


def test_the_fake_worker_notices_a_replica_that_decodes_all_the_same() -> None:
    scheduler, other = replica()
    running(scheduler, other)
    other.facts = PROMPTS_TOO
    scheduler._has_draft = False
    with pytest.raises(AssertionError, match="prompts and verify rounds in one step"):
        scheduler.step()


def test_prompts_of_both_are_computed_together() -> None:
    scheduler, other = replica()
    other.facts = PROMPTS_TOO
    scheduler.channel.inbox.append(make_request("a", PROMPT, 5))
    scheduler.step()
    assert scheduler.worker.forwards == {"extend": 1, "decode": 0} and other.votes == [1]


def test_a_waiting_request_without_room_is_no_prompt_and_keeps_nobody_from_decoding() -> None:
    """It would wait for tokens that nobody may draw, on every replica."""
    scheduler, other = replica(pool_tokens=128)
    running(scheduler, other, ignore_eos=True)
    other.facts = ROUND_TOO
    scheduler.channel.inbox.append(make_request("b", PROMPT[::-1], 60))
    scheduler.step()
    assert other.votes[-1] == 0 and scheduler.planner.can_start
    while scheduler.queues.waiting:
        scheduler.step()
        assert len(scheduler.worker.batch_sizes) < 200
    other.facts = NOTHING
    while scheduler.step():
        pass
    got = answers(scheduler.channel)
    assert got["a"].ids == expected_output(PROMPT, 60)
    assert got["b"].ids == expected_output(PROMPT[::-1], 60)


@pytest.mark.parametrize("mine", [True, False])
def test_a_narrow_round_of_one_replica_is_narrow_on_all(mine: bool) -> None:
    scheduler, other = replica(pool_tokens=64)
    scheduler.worker.num_correct = lambda ids: 0
    running(scheduler, other, ignore_eos=True)
    other.facts = ROUND_TOO if mine else ROUND_TOO._replace(slots_per_request=1)
    wide = 0 if not mine else 64 - WIDTH - 50 + 1
    for _ in range(14):
        scheduler.step()
    assert scheduler.worker.widths == [WIDTH] * wide + [1] * (14 - wide)
    own = [WIDTH] * (64 - WIDTH - 50 + 1)
    assert [facts.slots_per_request for facts in other.mine[1:15]] == own + [1] * (14 - len(own))


def test_an_idle_replica_takes_a_round_with_the_slots_of_the_others() -> None:
    scheduler, other = replica()
    other.facts = ROUND_TOO._replace(slots_per_request=2)
    scheduler.step()
    step = scheduler.worker.steps[-1]
    assert step is not None and step.slots_per_request == 2 and step.num_requests == [0, 3]
    assert scheduler.worker.forwards == {"extend": 0, "decode": 0, "idle": 1}
    assert other.gathers == ["vote", "facts", "forward", "forward", "forward"]


def test_a_step_without_work_gathers_the_vote_and_the_facts() -> None:
    scheduler, other = replica()
    assert not scheduler.step()
    assert other.gathers == ["vote", "facts"] and scheduler.worker.batch_sizes == []


def test_without_a_draft_there_is_no_vote_and_prompts_mix_with_decoding() -> None:
    scheduler, other = replica(slots_per_step=1)
    other.facts = PROMPTS_TOO
    scheduler.channel.inbox.append(make_request("a", PROMPT, 4))
    for _ in range(3):
        scheduler.step()
    assert other.votes == [] and scheduler.worker.forwards == {"extend": 1, "decode": 2}


def test_a_replica_that_is_told_to_stop_votes_all_the_same() -> None:
    scheduler, other = replica(enable_prefill_delayer=True)
    other.facts = PROMPTS_TOO
    scheduler.channel.inbox.append(make_request("a", PROMPT, 60))
    scheduler.step()
    del other.gathers[:]
    scheduler.channel.inbox.append(ShutdownReq())
    assert not scheduler.step()
    assert other.gathers == ["delayer", "vote", "facts"] and other.votes[-1] == 0


def test_the_delayer_decides_before_the_vote_and_the_replica_decodes_meanwhile() -> None:
    scheduler, other = replica(enable_prefill_delayer=True, prefill_delayer_max_delay_passes=2)
    other.facts = PROMPTS_TOO
    scheduler.channel.inbox.append(make_request("a", PROMPT, 60))
    scheduler.step()
    assert other.votes == [1]
    other.facts = ROUND_TOO
    scheduler.channel.inbox.append(make_request("b", PROMPT[:9], 4))
    for _ in range(3):
        scheduler.step()
    assert other.votes == [1, 0, 0, 1], "held back for two steps"
    assert scheduler.worker.forwards == {"extend": 2, "decode": 2}


def test_an_abort_in_a_step_of_prompts_elsewhere_gives_everything_back() -> None:
    scheduler, other = replica()
    running(scheduler, other)
    other.facts = ROUND_TOO
    scheduler.step()
    other.facts = PROMPTS_TOO
    scheduler.channel.inbox.append(AbortReq(rid="a"))
    scheduler.step()
    assert scheduler.queues.is_idle and scheduler.kv.used() == 0
    scheduler.invariants.check_idle()


def test_prompts_of_one_replica_stop_another_for_a_few_steps_at_most() -> None:
    """Without a bound a replica that gets a prompt in every step would keep the others from decoding."""
    scheduler, other = replica()
    channel = scheduler.channel
    assert isinstance(channel, FakeChannel)
    channel.inbox.append(make_request("mine", PROMPT, 20))
    scheduler.step()
    (req,) = scheduler.queues.running
    held_up, longest = 0, 0
    while req.finish_reason is None:
        assert scheduler._dp_attn is not None
        waits = scheduler._dp_attn.prompts_wait
        other.facts = NOTHING if waits else PROMPTS_TOO  # it has a prompt in every step in which it may
        before = len(req.output_ids)
        scheduler.step()
        held_up = 0 if len(req.output_ids) > before else held_up + 1
        longest = max(longest, held_up)
        assert (held_up == 0) == waits
    assert longest == MAX_PROMPT_STEPS
    assert answers(channel)["mine"].ids == expected_output(PROMPT, 20)

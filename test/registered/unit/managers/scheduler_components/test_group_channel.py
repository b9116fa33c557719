"""Ranks that hold the same requests have one inbox, one clock, one draw: a peer replays a leader's run."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import group_channel
from sglang.srt.managers.scheduler_components.group_channel import GroupChannel
from sglang.srt.managers.scheduler_components.schedule_batch import Plan
from sglang.srt.messages.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    GetInternalStateReq,
    ShutdownReq,
)
from sglang.srt.runtime_context import get_parallel, reset_context
from sglang.test.fakes.fake_channel import FakeChannel
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request
from sglang.test.test_utils import published_topology

PROMPT = [(7 * i) % 900 for i in range(50)]
#: Small enough that requests are cut, pushed back and resumed.
SMALL = {
    "tp_size": 2,
    "chunked_prefill_size": 16,
    "pool_tokens": 180,
    "max_running_requests": 5,
    "schedule_conservativeness": 0.1,
}


def traffic() -> dict[int, list[Any]]:
    """Messages by step: long and short, with logprobs, seeds and stops, an abort, control messages."""
    return {
        0: [make_request(f"r{i}", [i, *PROMPT[: 9 * i + 3]], 30 + i, ignore_eos=True) for i in range(5)],
        4: [
            make_request(
                "logprobs", PROMPT, 9, return_logprob=True, logprob_start_len=20, top_logprobs_num=2
            ),
            make_request("stops", PROMPT[:20], 40, stop=["zz"], min_new_tokens=3),
            FlushCacheReqInput(call_id=1),
        ],
        9: [AbortReq(rid="r3"), make_request("wrong", [5000], 3), GetInternalStateReq(call_id=2)],
        30: [make_request("late", PROMPT, 12, temperature=1.0, sampling_seed=5)],
    }


def live(scheduler: Scheduler, script: dict[int, list[Any]], steps: int | None = None) -> list[Any]:
    """What a rank would send, step by step, and where its requests are; until the script and the work end."""
    told: list[Any] = []
    scheduler.streamer._send = told.append
    history: list[Any] = []
    step = 0
    while steps is None or step < steps:
        if scheduler.channel is not None:
            scheduler.channel.inbox.extend(script.get(step, []))
        going_on = scheduler.step()
        scheduler.invariants.check_sum()
        scheduler.invariants.check_slots()
        queues = scheduler.queues
        history.append(
            (
                [req.rid for req in queues.running],
                [req.rid for req in queues.waiting],
                scheduler.kv.room(),
                scheduler.planner.new_token_ratio,
                list(told),
            )
        )
        told.clear()
        step += 1
        if steps is None and not going_on and step > max(script):
            break
    return history


def leader(**fields: Any) -> tuple[Scheduler, FakeGroup]:
    group = FakeGroup(2)
    return create_scheduler(groups={"attn_tp_group": group}, **{**SMALL, **fields}), group


def peer_of(group: FakeGroup, **fields: Any) -> Scheduler:
    reset_context()
    heard = FakeGroup(2, 1, heard=group.said)
    return create_scheduler(groups={"attn_tp_group": heard}, world_rank=1, **{**SMALL, **fields})


def test_a_peer_lives_through_exactly_what_its_leader_did() -> None:
    """Chunks, retractions, aborts, refusals and stops included: else its forwards would not meet."""
    first, group = leader()
    history = live(first, traffic())
    assert first.load.num_retractions > 0
    told = [news for *_, messages in history for message in messages for news in message.outputs]
    ended = {news.rid: news.finish_reason.type for news in told if news.finish_reason}
    assert len(ended) == 9 and ended["r3"] == ended["wrong"] == "abort"
    ids = [token for news in told if news.rid == "r1" for token in news.new_ids]
    assert ids == expected_output([1, *PROMPT[:12]], 31)

    second = peer_of(group)
    assert live(second, {}, steps=len(history)) == history
    assert second.channel is None and not second.group.is_leader
    assert not get_parallel().attn_tp_group.heard, "the leader said more than its peer listened to"


def test_a_peer_takes_the_leaders_draw_and_not_its_own() -> None:
    first, group = leader()
    first.worker.next_token = lambda ids: 11
    history = live(first, {0: [make_request("r", PROMPT, 5)]})
    second = peer_of(group)
    second.worker.next_token = lambda ids: 22
    assert live(second, {}, steps=len(history)) == history


def test_requests_expire_by_the_leaders_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    with envs.SGLANG_REQ_RUNNING_TIMEOUT.override(5.0):
        first, group = leader()
        tick = SimpleNamespace(monotonic=lambda: now.__setitem__(0, now[0] + 1) or now[0])
        monkeypatch.setattr(group_channel, "time", tick)
        history = live(first, {0: [make_request("r", PROMPT[:10], 100, ignore_eos=True)]})
        assert len(history) == 8, "started at 101, seen in the second step, more than 5 s later it ends"
        second = peer_of(group)
        no_clock = SimpleNamespace(monotonic=lambda: pytest.fail("a peer looked at its clock"))
        monkeypatch.setattr(group_channel, "time", no_clock)
        assert live(second, {}, steps=len(history)) == history


def test_a_peer_that_plans_another_batch_is_caught_with_both_plans() -> None:
    first, group = leader()
    live(first, {0: [make_request("a", PROMPT[:9], 4)]}, steps=1)
    second = peer_of(group)
    second.kv.allocator.alloc_extend(0, 3, 0)  # its next slots are others
    with pytest.raises(RuntimeError, match=r"another batch than its leader: .*num_tokens 9.*num_tokens 9"):
        second.step()


def test_a_peer_without_the_batch_of_its_leader_is_caught() -> None:
    first, group = leader()
    live(first, {0: [make_request("a", PROMPT[:9], 4)]}, steps=2)
    second = peer_of(group)
    second.planner.plan = lambda **given: Plan()
    second.step()
    with pytest.raises(RuntimeError, match=r"step 2, and its leader sent .'result'"):
        second.step()


def test_a_peer_with_a_batch_that_its_leader_lacks_is_caught() -> None:
    first, group = leader()
    first.planner.plan = lambda **given: Plan()
    live(first, {0: [make_request("a", PROMPT[:9], 4)]}, steps=2)
    with pytest.raises(RuntimeError, match="its leader ran none"):
        peer_of(group).step()


def test_a_peer_leaves_in_the_turn_in_which_its_leader_does() -> None:
    first, group = leader()
    history = live(first, {0: [make_request("a", PROMPT, 40)], 3: [ShutdownReq()]}, steps=4)
    assert first._stopping
    second = peer_of(group)
    live(second, {}, steps=3)
    assert not second._stopping
    second.step()
    assert second._stopping and len(history) == 4


def test_ranks_with_other_limits_are_refused_with_the_numbers() -> None:
    """An environment variable of one host, say."""

    class Differing(FakeGroup):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, value | {"running_timeout_s": 7.0}]

    with pytest.raises(RuntimeError, match=r"running_timeout_s: \[-1.*, 7.0\].*same flags and environment"):
        create_scheduler(tp_size=2, groups={"attn_tp_group": Differing(2)})


@pytest.mark.parametrize(("world_rank", "channel"), [(0, None), (1, FakeChannel())])
def test_the_leader_needs_a_channel_and_a_peer_must_have_none(world_rank: int, channel: Any) -> None:
    with (
        published_topology(tp_size=2, ranks={"world_rank": world_rank}),
        pytest.raises(RuntimeError, match="rank 0 of the group needs one"),
    ):
        GroupChannel(channel)


def test_a_resting_leader_is_back_before_its_peers_run_into_the_timeout() -> None:
    waits: list[float] = []
    channel = FakeChannel()
    channel.wait = waits.append
    with published_topology(tp_size=2, dist_timeout=1, ranks={"world_rank": 0}):
        GroupChannel(channel).rest(1.0)
    with published_topology(dist_timeout=1, ranks={"world_rank": 0}):
        GroupChannel(channel).rest(1.0)
    assert waits == [0.5, 1.0]


def test_one_rank_asks_no_group() -> None:
    """What several ranks need must cost one rank nothing."""
    groups = {name: FakeGroup(1) for name in ("attn_tp_group", "tp_group", "world_group")}
    scheduler = create_scheduler(groups=groups)
    live(scheduler, {0: [make_request("a", PROMPT, 4)]})
    assert not any(group.calls for group in groups.values())


def test_a_peer_checks_its_own_books_when_its_replica_is_idle() -> None:
    """A slot lost on a peer alone would show as another batch only much later."""
    first, group = leader()
    live(first, {0: [make_request("a", PROMPT, 4)], 20: []})
    second = peer_of(group)
    live(second, {}, steps=20)
    second.kv.allocator.alloc_extend(0, 1, 0)
    with pytest.raises(RuntimeError, match="does not add up"):
        second.step()

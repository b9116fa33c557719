"""Groups over the same ranks share a communicator: how many are made, and that the last user closes it."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="multi-rank-cpu")

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed

from sglang.srt.distributed import communicators, parallel_state
from sglang.srt.distributed.communicators import Communicator
from sglang.srt.distributed.errors import CollectiveError
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.multi_rank import run_ranks
from sglang.test.waiting import holds_within, wait_until

REPLICAS = {"enable_dp_attention": True, "dp_size": 2}
TWO_RANKS: list[dict[str, Any]] = [{"tp_size": 2}, {"tp_size": 2, **REPLICAS}, {"pp_size": 2}]
FOUR_RANKS: list[dict[str, Any]] = [
    {"tp_size": 4},
    {"tp_size": 4, **REPLICAS},
    {"tp_size": 4, "ep_size": 2},
    {"tp_size": 2, "pp_size": 2},
]
GROUPS = ("world", "tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp")


def _build(rank: int, fields: dict[str, Any]) -> None:
    publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=SpawnRanks(world_rank=rank))
    parallel_state.initialize_model_parallel()


def _made() -> int:
    """Communicators that torch holds for this rank, without the one that the world was joined with."""
    return len(torch.distributed.distributed_c10d._world.pg_map) - 1


def _exercise(rank: int) -> None:
    """Every kind of transfer over every group, one group after the other, and its own count of each."""
    for name in GROUPS:
        group = getattr(get_parallel(), f"{name}_group")
        before = Counter(group.calls)
        own = torch.tensor([float(rank), 1.0])
        assert group.all_reduce(own).tolist() == [sum(group.ranks), group.world_size], name
        assert group.all_gather(own[:1]).tolist() == group.ranks, name
        assert group.broadcast_object({"from": [name, rank]}, src=0) == {"from": [name, group.ranks[0]]}
        assert group.all_gather_object("x" * 5000 + str(rank))[-1][5000:] == str(group.ranks[-1])
        group.barrier(timeout_s=60)
        if group.rank_in_group == 0 and group.world_size > 1:
            group.send_object(name, dst=1)
        elif group.rank_in_group == 1:
            assert group.recv_object(src=0) == name
        ran = group.calls - before
        if group.world_size > 1:
            assert {ran[kind] for kind in ("all_reduce", "all_gather", "broadcast_object", "barrier")} == {1}
        else:
            assert not ran


def count_and_exercise(rank: int, layouts: list[dict[str, Any]]) -> list[int]:
    counts = []
    for fields in layouts:
        _build(rank, fields)
        counts.append(_made())
        _exercise(rank)
        parallel_state.destroy_model_parallel()
    return counts


def test_equal_partitions_make_one_communicator() -> None:
    """Each further one is a connection to every peer and a thread, on every rank. The world counts as well:
    its communicator serves all groups that are as wide.
    """
    assert run_ranks(count_and_exercise, world_size=2, layouts=TWO_RANKS) == [[1, 1, 1]] * 2
    # tp 4 attn-dp 2: the world and this rank's replica. ep 2: the world, MoE-TP and MoE-EP. pp 2: the world,
    # the tensor groups and the pipelines.
    assert run_ranks(count_and_exercise, world_size=4, layouts=FOUR_RANKS) == [[1, 2, 3, 3]] * 4


def count_without_sharing(rank: int, layouts: list[dict[str, Any]]) -> list[int]:
    def one_each(ranks: list[int], backend: str, timeout_s: float) -> Communicator:
        made = Communicator(ranks, backend, timeout_s)
        made.users = 1
        return made

    with patch.object(communicators, "borrow", one_each):
        return count_and_exercise(rank, layouts[:1])


def test_the_count_sees_groups_that_build_their_own() -> None:
    """With a planted fault, tp 2 makes three beside the world's."""
    assert run_ranks(count_without_sharing, world_size=2, layouts=TWO_RANKS) == [[4], [4]]


def give_back_one_by_one(rank: int) -> None:
    _build(rank, {"tp_size": 2})
    parallel = get_parallel()
    tp, attn_tp, moe_tp = parallel.tp_group, parallel.attn_tp_group, parallel.moe_tp_group
    assert tp.cpu_group is attn_tp.cpu_group is parallel.world_group.cpu_group
    for _ in range(2):
        tp.destroy()
    with pytest.raises(RuntimeError, match="all_reduce over 2 ranks: this group has no communicator"):
        tp.all_reduce(torch.ones(1))
    for living in (attn_tp, moe_tp, parallel.world_group):
        assert living.all_reduce(torch.ones(1)).item() == 2.0
    parallel_state.destroy_model_parallel()
    assert _made() == 1 and parallel.world_group.all_reduce(torch.ones(1)).item() == 2.0


def test_a_group_that_was_given_back_is_of_no_use_and_takes_nobody_along() -> None:
    """A stale copy that still worked would hide that its layout is gone.

    One that gave its communicator back twice would take it from those who still use it.
    """
    run_ranks(give_back_one_by_one, world_size=2)


def _held() -> tuple[int, int]:
    """(open descriptors, threads) of this process."""
    return len(os.listdir("/proc/self/fd")), len(list(Path("/proc/self/task").iterdir()))


def rebuild_often(rank: int, layouts: list[dict[str, Any]], rounds: int) -> list[tuple[int, int]]:
    held = []
    for _ in range(rounds):
        count_and_exercise(rank, layouts)
        held.append(_held())
    return held


def test_layouts_that_come_and_go_leave_no_descriptor_and_no_thread_behind() -> None:
    """A lab or an elastic deployment builds groups again and again, and must not leak a descriptor each time.

    The first rounds may open some that stay.
    """
    layouts = [{"tp_size": 4, **REPLICAS}, {"tp_size": 4, "ep_size": 2}]
    for held in run_ranks(rebuild_often, world_size=4, layouts=layouts, rounds=8):
        descriptors, threads = zip(*held, strict=True)
        assert descriptors[-1] <= descriptors[1] + 4 and threads[-1] <= threads[1] + 4, held


def wait_for_a_rank_that_stays_away(rank: int) -> str | None:
    """Barriers that all pass, over one communicator in two generations of groups; then rank 1 stays away."""
    for _ in range(2):
        _build(rank, {"tp_size": 2})
        get_parallel().tp_group.barrier(timeout_s=60)
        get_parallel().attn_tp_group.barrier(timeout_s=60)
        parallel_state.destroy_model_parallel()
    _build(rank, {"tp_size": 2})
    if rank == 1:
        return None
    with pytest.raises(CollectiveError) as caught:
        get_parallel().tp_group.barrier(timeout_s=0.5)
    return str(caught.value)


def test_a_barrier_of_a_rebuilt_group_still_names_who_is_missing() -> None:
    """Marks of earlier barriers lie in the same store, and must not count for this one."""
    message, _ = run_ranks(wait_for_a_rank_that_stays_away, world_size=2)
    assert message is not None and "world ranks [1] did not come" in message


def build_beside_a_late_rank(rank: int, folder: str, waits: bool) -> None:
    """Rank 1 is delayed while it makes a group, after its links are made.

    With `waits` the members leave together, as in the product; else each leaves when it is ready, and the
    late one notices.
    """
    left = Path(folder) / f"left-{waits}"
    make, held_up = torch.distributed.new_group, []

    def late(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        held_up.append(made)
        if waits:
            assert not holds_within(2.0, left.exists), "rank 0 left before rank 1 was ready"
        else:
            wait_until(left.exists)
        return made

    ready = communicators.MarkedBarrier.wait if waits else lambda barrier, timeout_s: None
    # Finding out about shared memory is an exchange, too, so the fault is to do without both.
    transport = communicators.cpu_transport if waits else lambda gloo, *_: gloo
    with (
        patch.object(torch.distributed, "new_group", late if rank == 1 else make),
        patch.object(communicators.MarkedBarrier, "wait", ready),
        patch.object(communicators, "cpu_transport", transport),
    ):
        # Of another limit than the world, whose communicator it would share.
        group = parallel_state.GroupCoordinator([[0, 1]], rank, "gloo", group_name="tp", timeout_s=170.0)
    left.touch()
    assert len(held_up) == rank  # once, on rank 1: else nothing was looked at
    torch.distributed.barrier()
    group.destroy()


@pytest.mark.parametrize("waits", [True, False], ids=["as built", "the fault planted"])
def test_no_member_leaves_the_making_of_a_group_before_all_are_ready(tmp_path: Path, waits: bool) -> None:
    """A rank that destroyed its groups at once would close connections under a peer that still makes them."""
    run_ranks(build_beside_a_late_rank, world_size=2, folder=str(tmp_path), waits=waits)


# -- one order of calls ------------------------------------------------------------------------------------


def _in_a_thread(name: str, act: Callable[[], Any]) -> Any:
    """What `act` gives in a thread of its own, which has ended then; its RuntimeError as text."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(act())
        except RuntimeError as error:
            answers.append(str(error))

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return answers[0]


def use_from_two_threads(rank: int, guarded: bool) -> list[Any]:
    """What `moe_tp` answers in a thread of its own: before and while the main thread, which lives on, uses
    `tp` over the same communicator; then `tp` there, and `moe_tp` once `tp` is given back."""
    _build(rank, {"tp_size": 2})
    tp, moe_tp = get_parallel().tp_group, get_parallel().moe_tp_group

    def add(group: Any) -> float:
        return group.all_reduce(torch.ones(1)).item()

    with patch.object(Communicator, "claim", Communicator.claim if guarded else lambda *_: None):
        answers = [_in_a_thread("early", lambda: add(moe_tp)), add(moe_tp), add(tp)]
        answers.append(_in_a_thread("late", lambda: add(moe_tp)))
        answers.append(_in_a_thread("late", lambda: add(tp)))
        before = Counter(moe_tp.calls)
        answers.append(_in_a_thread("late", lambda: moe_tp.all_gather_object(rank)))
        assert (moe_tp.calls == before) is guarded, "a refused call was counted"
        tp.destroy()
        answers.append(_in_a_thread("late", lambda: add(moe_tp)))
    return answers


def test_two_groups_of_one_communicator_are_not_used_from_two_threads() -> None:
    """Their calls have no common order over the ranks: each got sums of the other's tensors, and no error. A
    thread that has ended has handed over, as has a group that is given back; one group may be used from any
    thread."""
    for answers in run_ranks(use_from_two_threads, world_size=2, guarded=True):
        assert answers[:3] == [2.0] * 3 and answers[4] == answers[6] == 2.0
        for refused in (answers[3], answers[5]):
            assert "group 'moe_tp' in thread 'late' shares its communicator with group 'tp'" in refused
            assert "thread 'MainThread' uses" in refused and "in one thread" in refused


def test_nothing_else_stops_two_groups_in_two_threads() -> None:
    """The twin: without the guard the same calls are taken, which here, one after the other, goes well."""
    for answers in run_ranks(use_from_two_threads, world_size=2, guarded=False):
        assert answers == [2.0, 2.0, 2.0, 2.0, 2.0, [0, 1], 2.0]

"""Every layout of two and of four ranks on gloo: each group has its members, and they reach each other."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="multi-rank-cpu")

import os
from typing import Any

import pytest
import torch
import torch.distributed

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.group_layout import GroupSizes, layout
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.test.multi_rank import RankFailed, run_ranks
from sglang.test.waiting import wait_until

TWO_RANKS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"pp_size": 2},
    {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    {"tp_size": 2, "attn_cp_size": 2},
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "moe_dp_size": 2},
    {"tp_size": 2, "dcp_size": 2},
]
FOUR_RANKS: list[dict[str, Any]] = [
    {"tp_size": 4, "ep_size": 2},
    {"tp_size": 2, "pp_size": 2, "ep_size": 2},
    {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "moe_dp_size": 2},
    {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2},
    {"tp_size": 4, "dcp_size": 2},
]
GROUPS = ("tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp")


def _sizes() -> GroupSizes:
    parallel = get_parallel()
    names = ("tp", "pp", "attn_dp", "attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp", "dcp")
    return GroupSizes(**{f"{name}_size": getattr(parallel, f"{name}_size") for name in names})


def _sum_over(group: Any) -> int:
    """Sum of the members' world ranks."""
    return int(group.all_reduce(torch.tensor([float(torch.distributed.get_rank())])).item())


def check_layouts(rank: int, layouts: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """On one rank: publish, build, compare each group with the arithmetic, use it, destroy it."""
    answers, kept = [], []
    open_after_first = 0
    for fields in layouts:
        record = ServerArgs(model_path="dummy", **fields)
        publish(record, role="test", ranks=SpawnRanks(world_rank=rank))
        parallel_state.initialize_model_parallel()
        expected = layout(_sizes())
        mine = {}
        for name in GROUPS:
            group = getattr(get_parallel(), f"{name}_group")
            wanted = next(ranks for ranks in expected[name] if rank in ranks)
            assert group.ranks == wanted, (fields, name, group, wanted)
            assert group.rank_in_group == getattr(get_parallel(), f"{name}_rank"), (fields, name)
            assert _sum_over(group) == sum(wanted), (fields, name)
            mine[name] = group.ranks
        answers.append(mine)
        # Ranks read live, with no bundle, are the ones the bundle stamped.
        stamped = {f"{name}_rank": getattr(get_parallel(), f"{name}_rank") for name in GROUPS}
        get_parallel().clear_stamp()
        assert {name: getattr(get_parallel(), name) for name in stamped} == stamped, fields
        kept.append(get_parallel().tp_group)  # a stale copy must not keep sockets open, nor answer
        parallel_state.destroy_model_parallel()
        if kept[-1].world_size > 1:
            with pytest.raises(RuntimeError, match="no communicator; it was destroyed"):
                kept[-1].all_reduce(torch.ones(1))
        open_after_first = open_after_first or num_open()
    # Groups that were given back keep no socket open; a transport may close its own a little later.
    wait_until(lambda: num_open() <= open_after_first, lambda: f"{num_open()}, first {open_after_first}")
    return answers


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_scopes_and_refusals(rank: int) -> list[str]:
    """On one of two ranks under attention DP: what is refused, and what a draft sees in its scopes."""
    seen = []
    fields = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    record = ServerArgs(model_path="dummy", **fields)
    publish(record, role="test", ranks=SpawnRanks(world_rank=rank))
    parallel_state.initialize_model_parallel()
    parallel = get_parallel()

    assert parallel.tp_group.all_reduce(torch.ones(1)).item() == 2.0
    assert parallel.attn_tp_group.all_reduce(torch.ones(1)).item() == 1.0

    with pytest.raises(RuntimeError, match="built 2, configured 1"):
        publish(ServerArgs(model_path="dummy"), role="test")
    assert parallel.tp_size == 2

    with draft_tp_context(owns_attention=True), draft_pp_context():
        assert (parallel.tp_size, parallel.tp_rank, parallel.attn_dp_size) == (1, 0, 1)
        assert parallel.tp_group.ranks == parallel.pp_group.ranks == [rank]
        assert parallel.moe_ep_group.ranks == [rank]
        seen.append(parallel.tp_group.group_name)
    with draft_tp_context(owns_attention=False):
        assert (parallel.tp_size, parallel.tp_rank, parallel.attn_dp_size) == (2, rank, 2)
        seen.append(parallel.tp_group.group_name)
    parallel_state.destroy_model_parallel()

    # A stamp that names another seat than the one this rank really has is caught at the build, and nothing
    # stands.
    publish(record, role="test", ranks=SpawnRanks(world_rank=1 - rank))
    with pytest.raises(ValueError, match="set by group build"):
        parallel_state.initialize_model_parallel()
    assert parallel_state._TP is None
    # A deployment of another size than the world is refused before any group is made.
    publish(ServerArgs(model_path="dummy", tp_size=4), role="test", ranks=SpawnRanks(world_rank=rank))
    with pytest.raises(ValueError, match=r"2 != 0 \+ 4 \* 1"):
        parallel_state.initialize_model_parallel()
    return seen


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has something to say")
    torch.distributed.barrier()


def test_every_layout_of_two_ranks_is_built_as_the_arithmetic_says() -> None:
    """Twice over in one process: what is destroyed leaves no socket behind."""
    answers = run_ranks(check_layouts, world_size=2, layouts=TWO_RANKS + TWO_RANKS)
    assert [answer[0]["tp"] for answer in answers] == [[0, 1], [0, 1]]
    assert [answer[1]["pp"] for answer in answers] == [[0, 1], [0, 1]]
    assert [answer[2]["attn_tp"] for answer in answers] == [[0], [1]]


def test_every_layout_of_four_ranks_is_built_as_the_arithmetic_says() -> None:
    """The golden part: with tp 4, ep 2 the experts are strided and their tensor slices are neighbours."""
    answers = run_ranks(check_layouts, world_size=4, layouts=FOUR_RANKS)
    assert [answer[0]["moe_ep"] for answer in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [answer[0]["moe_tp"] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [answer[1]["pp"] for answer in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [answer[4]["dcp"] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_draft_scope_on_real_groups_and_what_is_refused_beside_it() -> None:
    assert run_ranks(check_scopes_and_refusals, world_size=2) == [["attn_tp", "tp"], ["attn_tp", "tp"]]


def test_a_rank_that_fails_fails_the_run_with_its_own_words() -> None:
    """A failure on one rank only must fail the test: else all of the above could pass unseen."""
    with pytest.raises(RankFailed, match="rank one has something to say"):
        run_ranks(fail_on_rank_one, world_size=2)

"""Building groups: at the published widths, all or none, and really, in a world of one rank."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed

from sglang.srt.distributed import communication_op, parallel_state
from sglang.srt.distributed.group_layout import GroupSizes, layout
from sglang.srt.environ import envs
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

SLOTS = [
    "_TP", "_DCP", "_ATTN_CP", "_ATTN_TP", "_MOE_DP", "_MOE_EP", "_MOE_TP", "_PP", "_SELF_PP",
]  # fmt: skip


class _Group:
    """Stands for a built group; remembers whether it was given back."""

    def __init__(self, name: str, groups: list[list[int]], rank: int) -> None:
        self.name, self.groups, self.destroyed = name, groups, False
        self.ranks = next(group for group in groups if rank in group)
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)

    def destroy(self) -> None:
        self.destroyed = True


@contextmanager
def _pretended_world(world_size: int, rank: int, wrong: str = "") -> Iterator[list[_Group]]:
    """A world that is only said to be there; `wrong` names a kind that is built one rank wide."""
    built: list[_Group] = []

    def build(
        group_ranks: Any, local_rank: int, backend: str, *, group_name: str, timeout_s: float
    ) -> _Group:
        assert (local_rank, backend, timeout_s) == (rank, "gloo", 7.0)
        groups = [[other] for other in range(world_size)] if group_name == wrong else group_ranks
        built.append(_Group(group_name, groups, rank))
        return built[-1]

    world = SimpleNamespace(device_group=object(), local_rank=rank, timeout_s=7.0)
    with ExitStack() as stack:
        for name, value in (("is_initialized", True), ("get_world_size", world_size), ("get_rank", rank)):
            stack.enter_context(patch(f"torch.distributed.{name}", return_value=value))
        stack.enter_context(patch("torch.distributed.get_backend", return_value="gloo"))
        stack.enter_context(patch.object(parallel_state, "get_world_group", return_value=world))
        stack.enter_context(patch.object(parallel_state, "init_model_parallel_group", side_effect=build))
        yield built
        parallel_state.destroy_model_parallel()


def _publish(rank: int, **fields: Any) -> None:
    publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=SpawnRanks(world_rank=rank))


def test_every_group_is_built_as_the_layout_says_and_lands_in_its_slot() -> None:
    _publish(5, tp_size=8, dp_size=2, enable_dp_attention=True, attn_cp_size=2, ep_size=4, moe_dp_size=2)
    sizes = GroupSizes(
        tp_size=8, attn_dp_size=2, attn_cp_size=2, attn_tp_size=2, moe_dp_size=2, moe_ep_size=4, moe_tp_size=1
    )
    published = dict(get_parallel()._config or {}), dict(get_parallel()._stamp)
    with _pretended_world(8, 5) as built:
        parallel_state.initialize_model_parallel()
        assert {group.name: group.groups for group in built} == layout(sizes)
        assert built[0].name == "tp"
        assert [getattr(parallel_state, slot) for slot in SLOTS] == built
        assert (get_parallel()._config, get_parallel()._stamp) == published, (
            "the build writes no width and no rank"
        )
        assert parallel_state._TP is not None
    assert all(group.destroyed for group in built)
    assert [getattr(parallel_state, slot) for slot in SLOTS] == [None] * 9


def test_publishing_as_another_rank_while_groups_stand_is_refused() -> None:
    """The widths are equal, so nothing else notices that every group holds this process on another seat."""
    _publish(1, tp_size=4)
    with _pretended_world(4, 1):
        parallel_state.initialize_model_parallel()
        _publish(1, tp_size=4)  # the rank that built them
        with pytest.raises(
            RuntimeError, match=r"(?s)of another rank stand.*destroy_model_parallel.*built 1, con"
        ):
            _publish(2, tp_size=4)
        assert get_parallel().tp_rank == 1
        parallel_state.destroy_model_parallel()
        _publish(2, tp_size=4)
    assert get_parallel().tp_rank == 2


def test_groups_are_not_built_at_the_widths_of_an_open_scope() -> None:
    _publish(1, tp_size=4)
    narrow = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    with _pretended_world(4, 1) as built:
        with (
            get_parallel().override(**narrow),
            pytest.raises(RuntimeError, match=r"initialize_model_parallel\(\) inside an open .*tp_size"),
        ):
            parallel_state.initialize_model_parallel()
        assert built == []
        parallel_state.initialize_model_parallel()
        assert len(built) == 9


def test_the_build_takes_no_width_as_an_argument() -> None:
    assert inspect.signature(parallel_state.initialize_model_parallel).parameters == {}


def test_a_group_built_at_another_width_takes_all_groups_down_again() -> None:
    _publish(1, tp_size=4, ep_size=2)
    with _pretended_world(4, 1, wrong="moe_ep") as built:
        with pytest.raises(ValueError, match=r"set by group build.*\n.*moe_ep_group.*built 1, configured 2"):
            parallel_state.initialize_model_parallel()
        assert len(built) == 9 and all(group.destroyed for group in built)
        assert parallel_state._TP is None


def test_a_group_whose_seat_is_not_the_stamped_one_is_refused() -> None:
    _publish(2, tp_size=4)
    with (
        _pretended_world(4, 1),
        pytest.raises(ValueError, match=r"tp_group.rank_in_group == tp_rank: built 1, conf"),
    ):
        parallel_state.initialize_model_parallel()


@pytest.mark.parametrize(
    "fields, world_size, words",
    [
        ({"tp_size": 2}, 4, r"4 != 0 \+ 2 \* 1"),
        ({"tp_size": 2, "pp_size": 2}, 2, r"2 != 0 \+ 2 \* 2"),
    ],
)
def test_a_world_that_does_not_fit_is_refused_before_any_group(
    fields: dict[str, Any], world_size: int, words: str
) -> None:
    _publish(0, **fields)
    with _pretended_world(world_size, 0) as built:
        with pytest.raises(ValueError, match=words):
            parallel_state.initialize_model_parallel()
        assert built == []


def test_a_joiner_builds_its_own_cohort_and_an_earlier_rank_does_not() -> None:
    record = ServerArgs(model_path="dummy", tp_size=2, ep_join_rank_offset=2)
    publish(record, role="test", ranks=SpawnRanks(world_rank=3))
    with _pretended_world(4, 3) as built:
        parallel_state.initialize_model_parallel()
        assert built[0].groups == [[2, 3]]
    with _pretended_world(4, 1) as built, pytest.raises(ValueError, match="rank 1 lies below"):
        parallel_state.initialize_model_parallel()
    assert built == []


def test_building_in_the_wrong_order_names_the_missing_step() -> None:
    with pytest.raises(RuntimeError, match="init_distributed_environment"):
        parallel_state.initialize_model_parallel()
    with _pretended_world(1, 0), pytest.raises(ValueError, match="'parallel' not published"):
        parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()  # empty slots are fine
    _publish(0)
    with _pretended_world(1, 0):
        parallel_state.initialize_model_parallel()
        with pytest.raises(RuntimeError, match=r"groups stand already.*destroy_model_parallel"):
            parallel_state.initialize_model_parallel()


@pytest.fixture
def one_rank() -> Any:
    _publish(0)
    parallel_state.init_distributed_environment()
    parallel_state.initialize_model_parallel()
    return get_parallel()


def test_one_rank_needs_no_port_and_no_name(one_rank: Any) -> None:
    assert torch.distributed.get_backend() == "gloo"
    assert envs.GLOO_SOCKET_IFNAME.get() is not None
    world = one_rank.world_group
    assert (one_rank.launch_world_size, world.ranks, world.world_size, world.rank_in_group) == (1, [0], 1, 0)
    assert {"world_size", "rank_in_group"} <= set(vars(world)), "plain attributes of the instance"


@pytest.mark.parametrize("slot", ["_WORLD", *SLOTS])
def test_a_group_of_one_rank_makes_no_communicator(one_rank: Any, slot: str) -> None:
    group = getattr(parallel_state, slot)
    assert group.device_group is None and group.cpu_group is None


def test_collectives_over_one_rank_are_what_went_in(one_rank: Any) -> None:
    """Also on a coordinator that has nothing but its width and seat, as tests and draft scopes make them."""
    bare = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
    bare.world_size, bare.rank_in_group = 1, 0
    tensor = torch.ones(2, 3)
    for group in (one_rank.tp_group, bare):
        for collective in (group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast):
            assert collective(tensor) is tensor
        for collective in (group.all_gatherv, group.reduce_scatterv):
            assert collective(tensor, [2]) is tensor
        assert group.all_to_all(tensor) is tensor
        assert group.broadcast_object({"a": (1,)}) == {"a": (1,)}
        assert group.all_gather_object(5) == [5]
        assert group.broadcast_tensor_dict({"t": tensor})["t"] is tensor
        assert group.barrier() is None
    assert one_rank.tp_group.calls == {}, "only what really ran is counted"
    for name in communication_op.__all__:
        if name.endswith(("reduce", "gather", "scatter", "broadcast")):
            assert getattr(communication_op, name)(tensor) is tensor


def test_the_world_is_entered_once_and_left_twice(one_rank: Any) -> None:
    with pytest.raises(RuntimeError, match="built already"):
        parallel_state.init_distributed_environment()
    parallel_state.destroy_distributed_environment()
    parallel_state.destroy_distributed_environment()
    assert not torch.distributed.is_initialized()
    parallel_state.init_distributed_environment()
    assert parallel_state.get_world_group().world_size == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"world_size": 2, "rank": 2}, "rank 2, world_size 2"),
        ({"world_size": 2, "rank": -1}, "rank -1, world_size 2"),
        ({"world_size": 2, "rank": 0}, "a place to meet"),
    ],
)
def test_a_world_that_cannot_meet_is_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parallel_state.init_distributed_environment(**arguments)


def test_gloo_is_kept_on_the_loopback_unless_another_interface_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *args, **kwargs: started.append(kwargs)
    )
    monkeypatch.setattr(parallel_state, "GroupCoordinator", lambda *args, **kwargs: object())
    monkeypatch.setattr(parallel_state, "_WORLD", None)
    store = torch.distributed.HashStore()
    with envs.GLOO_SOCKET_IFNAME.override(None):
        parallel_state.init_distributed_environment(world_size=2, rank=0, store=store, timeout_s=7)
        assert envs.GLOO_SOCKET_IFNAME.get() == "lo"
    assert started[-1]["store"] is store and started[-1]["timeout"].total_seconds() == 7
    with envs.GLOO_SOCKET_IFNAME.override("eth7"):
        parallel_state.init_distributed_environment()
        assert envs.GLOO_SOCKET_IFNAME.get() == "eth7", "what the operator set stays"


def test_a_coordinator_needs_its_rank_in_exactly_one_list(one_rank: Any) -> None:
    for groups in ([[1]], [[0], [0]]):
        with pytest.raises(ValueError, match="exactly once"):
            parallel_state.GroupCoordinator(groups, 0, "gloo", group_name="odd")


@pytest.mark.parametrize("groups", [[[1, 0]], [[2, 3], [1, 0]], [[0, 0, 1]]])
def test_ranks_that_do_not_ascend_are_refused_before_anything_is_built(groups: list[list[int]]) -> None:
    """The transport sorts them, so that each rank waited for a peer in another seat and reported it dead."""
    with (
        patch("torch.distributed.get_rank", return_value=0),
        patch("torch.distributed.new_group", side_effect=AssertionError("a group was built")) as made,
    ):
        with pytest.raises(ValueError, match=r"group 'odd': .* must ascend, got \[.*pass \[0, 1\]"):
            parallel_state.GroupCoordinator(groups, 0, "gloo", group_name="odd")
        assert made.call_count == 0
        with pytest.raises(AssertionError, match="was built"):  # the twin: in order it comes as far as that
            parallel_state.GroupCoordinator([[0, 1], [2, 3]], 0, "gloo", group_name="odd")

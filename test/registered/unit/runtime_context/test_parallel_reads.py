"""What answers one read of the parallel context, in which order, and what is said when nothing does."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import copy
import pickle
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.runtime_context import (
    _LIVE_READS,
    ParallelContext,
    SpawnRanks,
    _derived_widths,
    _parallel_config_leaves,
    _parallel_fields,
    get_parallel,
    publish,
)
from sglang.srt.runtime_context.parallel import GETTER_MODULE
from sglang.srt.server_args import ServerArgs


def _published(**fields: Any) -> ParallelContext:
    ranks = fields.pop("ranks", None)
    publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=ranks)
    return get_parallel()


@pytest.mark.parametrize("name", sorted(_parallel_config_leaves()))
def test_a_leaf_is_answered_by_scope_then_stamp_then_publish(name: str) -> None:
    """Each leaf by itself: one wired to another name would answer a plausible number."""
    parallel = _published()
    published = getattr(parallel, name)
    assert parallel.answered_by(name) == "published"
    stamp, scope = object(), object()
    parallel.override_permanently(**{name: stamp})
    assert getattr(parallel, name) is stamp
    with parallel.override(**{name: scope}):
        assert getattr(parallel, name) is scope
        assert parallel.answered_by(name) == "scope"
    assert getattr(parallel, name) is stamp
    parallel.clear_stamp()
    assert getattr(parallel, name) is published


#: Written out by hand: a table compared with itself would hide a name wired to its neighbour's getter.
GETTERS = {
    "launch_world_size": "get_world_size",
    "launch_world_rank": "get_world_rank",
    "tp_rank": "get_tensor_model_parallel_rank",
    "pp_rank": "get_pipeline_model_parallel_rank",
    "dcp_rank": "get_dcp_rank",
    "moe_ep_rank": "get_moe_expert_parallel_rank",
    "moe_dp_rank": "get_moe_data_parallel_rank",
    "moe_tp_rank": "get_moe_tensor_parallel_rank",
    "attn_tp_rank": "get_attn_tensor_model_parallel_rank",
    "attn_cp_rank": "get_attn_context_model_parallel_rank",
} | {
    f"{kind}_group": f"get_{kind}_group"
    for kind in ("world", "tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp")
}


def test_the_live_names_are_the_ranks_the_groups_and_the_launch_width() -> None:
    assert set(_LIVE_READS) == set(GETTERS)


@pytest.mark.parametrize("name, getter", sorted(GETTERS.items()))
def test_a_live_name_asks_its_own_getter_and_no_other(name: str, getter: str) -> None:
    sentinel = object()
    refuse = AssertionError("another getter was asked")
    others = [patch(f"{GETTER_MODULE}.{other}", side_effect=refuse) for other in set(GETTERS.values())]
    for other in others:
        other.start()
    try:
        with patch(f"{GETTER_MODULE}.{getter}", return_value=sentinel):
            assert getattr(get_parallel(), name) is sentinel
    finally:
        patch.stopall()


@pytest.mark.parametrize("name", sorted(_LIVE_READS))
def test_a_stamped_or_stated_name_asks_no_group(name: str) -> None:
    with patch(f"{GETTER_MODULE}.{_LIVE_READS[name]}", side_effect=AssertionError("asked")):
        get_parallel().override_permanently(**{name: "stamp"})
        assert getattr(get_parallel(), name) == "stamp"
        with get_parallel().override(**{name: "scope"}):
            assert getattr(get_parallel(), name) == "scope"


def test_none_is_an_answer_in_a_scope_and_in_a_stamp() -> None:
    """A look-up by `is None` would fall through to the published value or to a group that is not there."""
    parallel = _published(max_ep_size=7)
    parallel.override_permanently(dp_rank=None)
    assert parallel.dp_rank is None
    with parallel.override(max_ep_size=None, tp_group=None):
        assert parallel.max_ep_size is None
        assert parallel.tp_group is None


def test_a_group_that_was_not_built_says_who_builds_it() -> None:
    with pytest.raises(RuntimeError, match=r"tp group is not built.*initialize_model_parallel"):
        _ = get_parallel().tp_rank
    with pytest.raises(RuntimeError, match=r"world group is not built.*init_distributed_environment"):
        _ = get_parallel().launch_world_size


def test_an_attribute_error_inside_a_getter_is_not_mistaken_for_a_missing_name() -> None:
    with (
        patch(f"{GETTER_MODULE}.get_tensor_model_parallel_rank", side_effect=AttributeError("deep inside")),
        pytest.raises(RuntimeError, match="could not answer 'tp_rank': deep inside"),
    ):
        _ = get_parallel().tp_rank


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("tp_size", ValueError, ("config namespace 'parallel' not published", "override(tp_size=...)")),
        ("attn_tp_size", RuntimeError, ("derived parallel width 'attn_tp_size'", "not available")),
        ("attn_dp_rank", RuntimeError, ("initialize_dp_attention", "attn_dp_rank")),
        ("dp_rank", RuntimeError, ("rank bundle", "SpawnRanks(dp_rank=...)")),
        ("gpu_id", RuntimeError, ("rank bundle", "SpawnRanks(gpu_id=...)")),
        ("tp_sise", AttributeError, ("has no 'tp_sise'", "tp_size")),
        ("world_size", AttributeError, ("has no 'world_size'",)),
        ("local_attn_dp_size", AttributeError, ("has no 'local_attn_dp_size'",)),
    ],
)
def test_nothing_found_names_the_name_and_the_cure(
    name: str, kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        getattr(get_parallel(), name)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_leaf_that_the_published_object_lacks_is_not_called_unpublished() -> None:
    from sglang.srt.runtime_context import get_context

    get_context().set_server_args(object())
    with pytest.raises(ValueError, match="the published record has no 'tp_size'"):
        _ = get_parallel().tp_size


def test_the_names_come_from_the_declarations_and_do_not_overlap() -> None:
    leaves, quotients, live = _parallel_config_leaves(), set(_derived_widths()), set(_LIVE_READS)
    assert leaves == set(Parallel.__annotations__)
    assert not leaves & quotients and not leaves & live and not quotients & live
    assert _parallel_fields() - leaves - quotients - live == {
        "attn_dp_rank",
        "dp_rank",
        "gpu_id",
        "max_world_size",
        "attn_dcp_rank",
        "is_attn_tp_leader",
        "num_worlds",
        "num_replicas",
        "replica_rank",
        "ranks_on_host",
    }


def test_properties_cannot_be_assigned_and_unknown_attributes_cannot_be_added() -> None:
    for name in ("tp_size", "tp_rank", "attn_tp_size", "tp_group"):
        with pytest.raises(
            AttributeError, match=rf"read-only.*override\({name}=\.\.\.\).*_permanently\({name}="
        ):
            setattr(get_parallel(), name, 1)
    with pytest.raises(AttributeError, match="has no 'tp_sise'; nearest: tp_size"):
        get_parallel().tp_sise = 1
    assert not hasattr(get_parallel(), "__dict__")


def test_a_copy_and_a_half_built_instance_are_harmless() -> None:
    parallel = _published(tp_size=2, ranks=SpawnRanks(world_rank=1))
    twin = copy.copy(parallel)
    assert (twin.tp_size, twin.tp_rank) == (2, 1)
    twin.override_permanently(tp_rank=0, attn_tp_rank=0)
    with twin.override(pp_size=4):
        assert (parallel.tp_rank, parallel.pp_size) == (1, 1)
    twin.clear_stamp()
    assert parallel.tp_rank == 1
    for carry in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"belongs to its process.*get_parallel\(\)"):
            carry(parallel)
    blank = ParallelContext.__new__(ParallelContext)
    for name in ("_config", "_stamp", "_overrides", "_layers", "__deepcopy__", "tp_size"):
        with pytest.raises(AttributeError):
            getattr(blank, name)


def test_the_computed_names_follow_what_they_are_computed_from_and_can_be_stated() -> None:
    parallel = _published(tp_size=4, dcp_size=4, ranks=SpawnRanks(world_rank=3))
    assert parallel.attn_dcp_rank == 3
    with parallel.override(dcp_enabled=False):
        assert parallel.attn_dcp_rank == 0
    with parallel.override(attn_dcp_rank=2, max_world_size=5):
        assert (parallel.attn_dcp_rank, parallel.max_world_size) == (2, 5)
    with parallel.override(launch_world_size=4):
        assert parallel.max_world_size == 4
        with parallel.override(max_ep_size=32):
            assert parallel.max_world_size == 32


@pytest.mark.parametrize(
    "fields, dp_rank, world_rank, expected",
    [  # (worlds, replicas, this rank's replica, whether it leads)
        ({}, None, 0, (1, 1, 0, True)),
        ({"tp_size": 2}, None, 1, (1, 1, 0, False)),
        ({"tp_size": 2, "dp_size": 3}, 2, 0, (3, 3, 2, True)),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, None, 3, (1, 2, 1, False)),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, None, 3, (1, 4, 3, True)),
    ],
)
def test_leader_and_replica_follow_from_the_layout(
    fields: dict[str, Any], dp_rank: int | None, world_rank: int, expected: tuple[int, int, int, bool]
) -> None:
    parallel = _published(**fields, ranks=SpawnRanks(world_rank=world_rank, dp_rank=dp_rank))
    answers = (parallel.num_worlds, parallel.num_replicas, parallel.replica_rank, parallel.is_attn_tp_leader)
    assert answers == expected


def test_the_only_rank_of_an_attention_group_leads_it_without_asking_the_group() -> None:
    with patch(f"{GETTER_MODULE}.get_attn_tp_group", side_effect=AssertionError("asked")):
        assert _published().is_attn_tp_leader


def test_a_scope_is_seen_by_every_thread() -> None:
    """Placement is a fact of the process, not of a task: a helper thread must not read the target's width."""
    parallel = _published()
    seen: list[int] = []
    with parallel.override(tp_rank=0, tp_size=1, nccl_port=4711):
        worker = threading.Thread(target=lambda: seen.append(get_parallel().nccl_port))
        worker.start()
        worker.join()
    assert seen == [4711]


def test_leaf_quotient_and_stamp_reads_stay_inside_one_graph() -> None:
    """A graph break here is silent: every answer stays right and every step gets slower."""
    _published(tp_size=8, dp_size=2, enable_dp_attention=True, ranks=SpawnRanks(world_rank=5))

    def read(x: torch.Tensor) -> torch.Tensor:
        parallel = get_parallel()
        sizes = parallel.tp_size + parallel.attn_tp_size * 10
        return x * (sizes + parallel.tp_rank * 100 + parallel.replica_rank * 1000)

    compiled = torch.compile(read, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 1000 + 8 + 40 + 500
    with get_parallel().override(tp_rank=4, attn_tp_rank=0):
        assert compiled(torch.ones(1)).item() == 1000 + 8 + 40 + 400, (
            "a scope must invalidate the compiled read"
        )
    assert compiled(torch.ones(1)).item() == 1000 + 8 + 40 + 500

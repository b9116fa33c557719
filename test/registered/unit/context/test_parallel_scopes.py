"""Scopes and stamps: stated whole or not at all, and gone afterwards."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
from sglang.srt.server_args import ServerArgs


@pytest.fixture
def parallel() -> Any:
    """Rank 3 of four, two attention replicas of two."""
    record = ServerArgs(model_path="dummy", tp_size=4, dp_size=2, enable_dp_attention=True)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=3))
    return get_parallel()


def test_scopes_nest_and_each_takes_only_its_own_names_back(parallel: Any) -> None:
    with parallel.override(nccl_port=1, pp_size=1):
        with parallel.override(nccl_port=2, node_rank=5):
            assert (parallel.nccl_port, parallel.node_rank) == (2, 5)
        assert (parallel.nccl_port, parallel.node_rank) == (1, 0)
        assert set(parallel._overrides) == {"nccl_port", "pp_size"}
    assert parallel._overrides == {}


def test_a_scope_closes_on_an_exception(parallel: Any) -> None:
    with pytest.raises(KeyError), parallel.override(nccl_port=1):
        raise KeyError("boom")
    assert parallel._overrides == {}
    assert parallel.nccl_port is None


@pytest.mark.parametrize(
    "names, words",
    [
        ({"tp_sise": 1}, ("unknown parallel field", "tp_sise", "tp_size")),
        ({"world_size": 1, "tp_rank": 0}, ("unknown parallel field", "world_size")),
        ({"tp_size": 2}, ("set by override", "2 != 2 * 2 * 1")),
    ],
)
def test_a_refused_scope_never_opened(parallel: Any, names: dict[str, Any], words: tuple[str, ...]) -> None:
    entered = False
    with pytest.raises(ValueError) as caught, parallel.override(**names):
        entered = True
    assert not entered
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert parallel._overrides == {}
    assert parallel.tp_size == 4


def test_a_refused_stamp_leaves_the_old_stamp(parallel: Any) -> None:
    with pytest.raises(ValueError, match="set by stamp"):
        parallel.override_permanently(tp_rank=4)
    assert parallel.tp_rank == 3
    with pytest.raises(ValueError, match="unknown parallel field"):
        parallel.override_permanently(tp_rank=2, not_a_name=1)
    assert parallel.tp_rank == 3
    parallel.override_permanently()
    assert parallel.tp_rank == 3


def test_a_scope_checks_what_outer_scopes_state_together_with_its_own(parallel: Any) -> None:
    with parallel.override(
        tp_size=2, attn_dp_size=1, moe_tp_size=2, tp_rank=1, attn_dp_rank=0, moe_tp_rank=1
    ):
        with pytest.raises(ValueError, match="0 <= tp_rank < tp_size"), parallel.override(tp_rank=2):
            pass
        with parallel.override(tp_rank=0, attn_tp_rank=0):
            assert parallel.tp_rank == 0


def test_a_scope_compares_the_groups_it_states_and_no_others(parallel: Any) -> None:
    """A group that was not mentioned is the group build's business; asking it per scope would cost and
    mislead."""
    wide, fitting = SimpleNamespace(world_size=8), SimpleNamespace(world_size=4)
    with (
        pytest.raises(ValueError, match=r"tp_group.world_size == tp_size: built 8, configured 4"),
        parallel.override(tp_group=wide),
    ):
        pass
    with parallel.override(tp_group=fitting):
        assert parallel.tp_group is fitting
    parallel.override_permanently(tp_group=fitting)
    with parallel.override(nccl_port=3):  # the stamped group is not looked at
        pass
    with parallel.override(tp_group=object(), attn_tp_group=None):  # no width to compare
        pass


def test_an_override_of_a_leaf_does_not_move_a_quotient(parallel: Any) -> None:
    with parallel.override(dp_size=1):
        assert parallel.attn_dp_size == 2


def test_clearing_the_stamp_drops_the_spawn_bundle(parallel: Any) -> None:
    parallel.clear_stamp()
    with pytest.raises(RuntimeError, match="rank bundle"):
        _ = parallel.dp_rank
    assert parallel.tp_size == 4


def test_reset_inside_an_open_scope_is_refused_and_changes_nothing(parallel: Any) -> None:
    with parallel.override(nccl_port=1):
        with pytest.raises(AssertionError, match="nccl_port"):
            reset_context()
        assert parallel.tp_size == 4


def test_the_parallel_context_survives_a_reset(parallel: Any) -> None:
    reset_context()
    assert get_parallel() is parallel
    assert parallel._config is None and parallel._stamp == {}

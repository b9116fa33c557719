"""Scopes and stamps: stated whole or not at all, and gone afterwards."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import (
    SpawnRanks,
    get_context,
    get_flags,
    get_parallel,
    publish,
    reset_context,
)
from sglang.srt.runtime_context import parallel as parallel_module
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


@pytest.mark.parametrize("names", [{"tp_rank": 99}, {"tp_rank": 3, "attn_tp_rank": 1}])
def test_a_stamp_of_a_name_that_an_open_scope_states_is_refused(parallel: Any, names: dict[str, int]) -> None:
    """It was checked against the scope, and was read afterwards beside widths that it does not fit."""
    with parallel.override(
        tp_size=128,
        tp_rank=0,
        attn_tp_size=128,
        attn_tp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        moe_tp_size=128,
    ):
        with pytest.raises(RuntimeError, match=r"open parallel scope states .*tp_rank.*stamp it outside"):
            parallel.override_permanently(**names)
        with pytest.raises(ValueError, match="set by stamp"):  # fits the scope, not the deployment
            parallel.override_permanently(moe_tp_rank=99)
        parallel.override_permanently(dp_rank=1)
    assert (parallel.tp_rank, parallel.moe_tp_rank, parallel.dp_rank) == (3, 3, 1)
    assert parallel._overrides == {}


def test_a_stamp_that_contradicts_the_open_scope_is_refused_as_well(parallel: Any) -> None:
    """Read inside the scope, it would answer beside the scope's widths."""
    narrow = {
        "tp_size": 2,
        "tp_rank": 1,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "moe_tp_size": 2,
        "moe_tp_rank": 1,
    }
    parallel.override_permanently(pp_rank=0)
    with parallel.override(**narrow, pp_size=1), pytest.raises(ValueError, match="0 <= pp_rank < pp_size"):
        parallel.override_permanently(pp_rank=1)
    with parallel.override(**narrow), pytest.raises(ValueError, match="0 <= attn_tp_rank < attn_tp_size"):
        parallel.override_permanently(attn_tp_rank=2)


@pytest.mark.parametrize(
    "act",
    [
        lambda: publish(ServerArgs(model_path="dummy"), role="scheduler"),
        lambda: get_context().set_server_args(ServerArgs(model_path="dummy")),
        lambda: get_context().override_server_args(tp_size=2).install(),
    ],
)
def test_publishing_inside_an_open_scope_is_refused_and_changes_nothing(
    parallel: Any, act: Callable[[], Any]
) -> None:
    record = get_context().server_args
    with parallel.override(nccl_port=1):
        with pytest.raises(RuntimeError, match=r"publish inside an open parallel scope, .*nccl_port"):
            act()
        assert get_context().server_args is record and parallel.tp_rank == 3
    with get_context().override_server_args(tp_size=2):
        assert parallel.tp_size == 2
    assert get_context().server_args is record and parallel.tp_size == 4


def test_restoring_a_scoped_record_never_refuses(parallel: Any) -> None:
    scoped = get_context().override_server_args(tp_size=2)
    scoped.install()
    with parallel.override(nccl_port=1):
        scoped.restore()
    assert parallel.tp_size == 4


def test_the_attention_dp_flag_follows_a_stamped_width(parallel: Any) -> None:
    """`is_dp_attention_enabled` went on saying what was published, beside a width of one."""
    assert get_flags().dp.enabled
    parallel.override_permanently(attn_dp_size=1, attn_dp_rank=0, attn_tp_size=4, attn_tp_rank=3)
    assert not get_flags().dp.enabled
    parallel.clear_stamp()
    assert get_flags().dp.enabled
    get_flags().dp.enabled = False
    parallel.override_permanently(dp_rank=1)  # says nothing about the width, so the flag stays as written
    assert not get_flags().dp.enabled


def _draft_names(group: Any) -> dict[str, Any]:
    return {
        "tp_group": group, "tp_size": 2, "tp_rank": 1, "attn_dp_size": 1, "attn_dp_rank": 0,
        "moe_tp_size": 2, "moe_tp_rank": 1,
    }  # fmt: skip


def _checks(parallel: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who asked the identities, in order; a kept verdict asks nobody."""
    asked: list[str] = []
    real = parallel_module.validate_parallel

    def counted(candidate: Any, who: str, groups: Any, stated: Any) -> None:
        asked.append(who)
        real(candidate, who, groups, stated)

    monkeypatch.setattr(parallel_module, "validate_parallel", counted)
    return asked


class _Group:
    def __init__(self, width: int) -> None:
        self.world_size, self.rank_in_group = width, 1


def test_entering_the_same_scope_again_asks_no_identity(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, names = _checks(parallel, monkeypatch), _draft_names(_Group(2))
    for _ in range(5):
        with parallel.override(**names):
            assert parallel.tp_size == 2
    assert asked == ["override"]


def test_whatever_a_verdict_rests_on_makes_it_be_worked_out_anew(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: each of these contradicts what was found to fit, and a kept verdict would let it pass."""
    group = _Group(2)
    names = _draft_names(group)

    def refused(**changed: Any) -> str:
        with pytest.raises(ValueError) as caught, parallel.override(**{**names, **changed}):
            pass
        return str(caught.value)

    def fits() -> None:
        with parallel.override(**names):
            pass

    fits()
    assert "rank 2, width 2" in refused(tp_rank=2)
    group.world_size = 4
    assert "built 4, configured 2" in refused()
    group.world_size = 2
    fits()
    with parallel.override(**{**names, "attn_tp_size": True}):  # no width, so nothing can be compared with it
        pass
    with parallel.override(pp_size=1):
        fits()
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(world_size=3, rank_in_group=0))
    assert "0 <= launch_world_rank < launch_world_size: rank 3, width 3" in refused()
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(world_size=4, rank_in_group=0))
    fits()
    parallel.override_permanently(pp_size=3, pp_rank=2)
    assert "0 <= pp_rank < pp_size: rank 2, width 1" in refused(pp_size=1)
    record = ServerArgs(model_path="dummy", tp_size=8, dp_size=2, enable_dp_attention=True)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=3))
    assert "2 != 4 * 1 * 1" in refused()


def test_a_stated_value_without_a_hash_is_checked_each_time(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _checks(parallel, monkeypatch)
    for _ in range(2):
        with parallel.override(tp_group=SimpleNamespace(world_size=4)):
            pass
    assert asked == ["override"] * 2


def test_a_verdict_over_something_that_may_change_is_not_kept(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that was changed in place is the same key, and passed with another number."""
    asked, width = _checks(parallel, monkeypatch), torch.tensor(2)
    names = {**_draft_names(_Group(2)), "tp_size": width}
    for _ in range(2):
        with parallel.override(**names):
            assert type(parallel.tp_size) is int
            width.fill_(3)
            assert parallel.tp_size == 2  # what was checked is what is read
            width.fill_(2)
    assert asked == ["override"] * 2
    width.fill_(3)
    with pytest.raises(ValueError, match=r"3 != 2 \* 1 \* 1"), parallel.override(**names):
        pass
    group = _Group(2)
    group.world_size = width.fill_(2)  # type: ignore[assignment]
    with parallel.override(**_draft_names(group)):
        pass
    width.fill_(4)
    with (
        pytest.raises(ValueError, match="built 4, configured 2"),
        parallel.override(**_draft_names(group)),
    ):
        pass


def test_equal_values_of_which_an_outer_scope_states_a_part_have_a_verdict_of_their_own(
    parallel: Any,
) -> None:
    """A draft inside a scope that states `ep_size` has experts of its own; one scope of both contradicts
    itself."""
    outer = {"ep_size": 2, "moe_ep_size": 2, "moe_tp_size": 2, "moe_ep_rank": 1, "moe_tp_rank": 1}
    inner = {"moe_ep_size": 1, "moe_tp_size": 4, "moe_ep_rank": 0, "moe_tp_rank": 3}
    with parallel.override(**outer), parallel.override(**inner):
        assert parallel.moe_ep_size == 1
    with (
        pytest.raises(ValueError, match="ep_size == moe_ep_size: 2 != 1"),
        parallel.override(**{**outer, **inner}),
    ):
        pass


def test_verdicts_do_not_pile_up(parallel: Any) -> None:
    for port in range(1_000):
        with parallel.override(nccl_port=port):
            pass
    assert 0 < len(parallel._passed_checks) <= 64


def test_reset_inside_an_open_scope_is_refused_and_changes_nothing(parallel: Any) -> None:
    with parallel.override(nccl_port=1):
        with pytest.raises(AssertionError, match="nccl_port"):
            reset_context()
        assert parallel.tp_size == 4


def test_the_parallel_context_survives_a_reset(parallel: Any) -> None:
    reset_context()
    assert get_parallel() is parallel
    assert parallel._config is None and parallel._stamp == {}

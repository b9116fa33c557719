"""The scopes in which a draft runs: what they state, what they leave, how they are entered."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from dataclasses import fields, replace
from typing import Any

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    patch_pipeline_parallel_group,
    patch_tensor_parallel_group,
)
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import SpawnRanks, _parallel_fields, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils.weight_checker import WeightChecker

# The census of the house wants the keyword at every call; these names let a test make the calls it refuses.
tensor_door = draft_tp_context
tensor_scope = patch_tensor_parallel_group


def _group(width: int, rank: int) -> Any:
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.world_size, group.rank_in_group = width, rank
    return group


def _answers() -> dict[str, Any]:
    """Every name that can be read now, with its value."""
    found = {}
    for name in sorted(_parallel_fields()):
        try:
            found[name] = getattr(get_parallel(), name)
        except (RuntimeError, ValueError):
            continue
    return found


def _publish_target(monkeypatch: pytest.MonkeyPatch, **experts: int) -> Any:
    """Rank 7 of eight, second stage: attention replicas 2 x context 2 x tensor 2."""
    attention = {"dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2}
    record = ServerArgs(model_path="dummy", tp_size=8, pp_size=2, **attention, **experts)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=15, dp_rank=0))
    monkeypatch.setattr(parallel_state, "_ATTN_TP", _group(2, 1))
    monkeypatch.setattr(parallel_state, "_SELF_PP", _group(1, 0))
    return get_parallel()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    return _publish_target(monkeypatch, ep_size=2, moe_dp_size=2)


@pytest.mark.parametrize("experts", [{"ep_size": 2, "moe_dp_size": 2}, {"ep_size": 2}, {"ep_size": 8}, {}])
def test_an_owning_scope_states_every_name_of_the_drafts_world_and_no_other(
    monkeypatch: pytest.MonkeyPatch, experts: dict[str, int]
) -> None:
    """Over several expert layouts: with a single one a name left out can already have the draft's value."""
    target = _publish_target(monkeypatch, **experts)
    before = _answers()
    draft, alone = target.attn_tp_group, parallel_state._SELF_PP
    with draft_tp_context(owns_attention=True):
        inside = _answers()
        assert parallel_state._TP_STATE_PATCHED
    expected = {
        "tp_group": draft, "tp_size": 2, "tp_rank": 1,
        "attn_tp_group": draft, "attn_tp_size": 2, "attn_tp_rank": 1,
        "attn_dp_size": 1, "attn_dp_rank": 0, "replica_rank": 0,
        "attn_cp_group": alone, "attn_cp_size": 1, "attn_cp_rank": 0,
        "moe_ep_group": alone, "moe_ep_size": 1, "moe_ep_rank": 0,
        "moe_dp_group": alone, "moe_dp_size": 1, "moe_dp_rank": 0,
        "moe_tp_group": draft, "moe_tp_size": 2, "moe_tp_rank": 1,
    }  # fmt: skip
    assert inside == before | expected
    assert _answers() == before and not parallel_state._TP_STATE_PATCHED


def test_the_deployment_stays_what_it_is_inside_an_owning_scope(target: Any) -> None:
    with draft_tp_context(owns_attention=True):
        assert (target.dp_size, target.enable_dp_attention, is_dp_attention_enabled()) == (2, True, True)
        assert (target.pp_size, target.pp_rank, target.launch_world_rank) == (2, 1, 15)


def test_a_scope_that_does_not_own_attention_enters_nothing(target: Any) -> None:
    before = _answers()
    with draft_tp_context(owns_attention=False):
        assert _answers() == before and not parallel_state._TP_STATE_PATCHED
        assert target._overrides == {}


def test_installing_a_group_without_attention_changes_the_tensor_names_only(target: Any) -> None:
    whole = _group(8, 7)
    before = _answers()
    with patch_tensor_parallel_group(whole, owns_attention=False):
        assert _answers() == before | {"tp_group": whole, "tp_size": 8, "tp_rank": 7}
        assert parallel_state._TP_STATE_PATCHED
    assert _answers() == before


def test_a_group_that_does_not_fit_the_attention_layout_is_refused_before_the_scope_opens(
    target: Any,
) -> None:
    before = _answers()
    with (
        pytest.raises(ValueError, match=r"2 != 2 \* 2 \* 2"),
        patch_tensor_parallel_group(_group(2, 0), owns_attention=False),
    ):
        pass
    assert _answers() == before and not parallel_state._TP_STATE_PATCHED


@pytest.mark.parametrize("wrong", [None, 1, 0, "True", object()])
def test_anything_but_a_bool_is_a_type_error_at_the_call(target: Any, wrong: Any) -> None:
    """An old caller hands over a group; it must not silently get another scope, nor fail only when it
    enters."""
    with pytest.raises(TypeError, match=f"a bool, and got {type(wrong).__name__}"):
        tensor_door(wrong)
    with pytest.raises(TypeError):
        tensor_door(parallel_state._SELF_PP, True)
    with pytest.raises(TypeError):
        tensor_door()
    with pytest.raises(TypeError):
        tensor_scope(_group(2, 1))


@pytest.mark.parametrize("inner", [True, False])
def test_tensor_scopes_do_not_nest(target: Any, inner: bool) -> None:
    with draft_tp_context(owns_attention=True):
        with pytest.raises(AssertionError, match="open already"), draft_tp_context(owns_attention=inner):
            pass
        with (
            pytest.raises(AssertionError, match="do not nest"),
            patch_tensor_parallel_group(_group(2, 1), owns_attention=inner),
        ):
            pass
        assert parallel_state._TP_STATE_PATCHED and target.tp_size == 2
    assert not parallel_state._TP_STATE_PATCHED


def test_pipeline_scopes_do_not_nest_but_one_of_each_kind_may_be_open(target: Any) -> None:
    with draft_pp_context(), draft_tp_context(owns_attention=True):
        assert (target.pp_size, target.pp_rank, target.tp_size) == (1, 0, 2)
        assert target.pp_group is parallel_state._SELF_PP
        with pytest.raises(AssertionError, match="do not nest"), patch_pipeline_parallel_group(_group(1, 0)):
            pass
    assert (target.pp_size, target.pp_rank) == (2, 1)
    with draft_tp_context(owns_attention=True), draft_pp_context():
        assert parallel_state._TP_STATE_PATCHED
    assert target._overrides == {}


@pytest.mark.parametrize("door", ["tensor", "pipeline"])
def test_a_scope_restores_on_an_exception(target: Any, door: str) -> None:
    before = _answers()
    scope = draft_tp_context(owns_attention=True) if door == "tensor" else draft_pp_context()
    with pytest.raises(KeyError), scope:
        assert _answers() != before
        raise KeyError
    assert _answers() == before
    assert not parallel_state._TP_STATE_PATCHED and not parallel_state._PP_STATE_PATCHED


def test_the_pipeline_door_needs_the_one_rank_group(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_SELF_PP", None)
    with pytest.raises(RuntimeError, match="self_pp group is not built"), draft_pp_context():
        pass
    with draft_tp_context(owns_attention=True):  # the groups it would state are then stated as absent
        assert target.moe_ep_group is None and target.attn_cp_group is None


def test_the_pipeline_door_on_a_real_gloo_rank() -> None:
    publish(ServerArgs(model_path="dummy"), role="test", ranks=SpawnRanks())
    parallel_state.init_distributed_environment()
    parallel_state.initialize_model_parallel()
    with draft_pp_context(), draft_tp_context(owns_attention=True):
        assert get_parallel().pp_group.ranks == [0]
        assert get_parallel().tp_group is parallel_state._ATTN_TP


def test_a_report_names_the_runner_it_was_built_for(target: Any) -> None:
    """A weight check runs outside every draft scope, so it holds the draft's placement instead of asking."""
    with draft_tp_context(owns_attention=True), draft_pp_context():
        draft = ParallelState.from_context()
    checker = WeightChecker(get_model=lambda: None, ps=draft)
    told = checker._parallelism_info()
    assert (told.tp_rank, told.tp_size, told.pp_size, told.attn_dp_size) == (1, 2, 1, 1)
    assert (target.tp_rank, target.tp_size) == (7, 8)
    assert ParallelState.trivial(pp_rank=1, pp_size=2) == ParallelState(pp_rank=1, pp_size=2)
    with pytest.raises(ValueError, match="rank 2, width 2"):
        ParallelState.trivial(pp_rank=2, pp_size=2)
    with pytest.raises(NotImplementedError, match="weight updates"):
        checker.handle("compare")


@pytest.mark.parametrize("name", [field.name for field in fields(ParallelState)])
def test_a_model_runs_where_it_was_built_and_nowhere_else(target: Any, name: str) -> None:
    """Every width and rank that cuts a layer counts; the pipeline does not, whose scope a draft has left."""
    built = ParallelState.from_context()
    built.check_in_force()
    other = replace(built, **{name: getattr(built, name) + 1})
    if name.startswith("pp_"):
        other.check_in_force()
        return
    with pytest.raises(RuntimeError) as refused:
        other.check_in_force()
    message = str(refused.value)
    assert f"built at {name} {getattr(other, name)} cannot run at {name} {getattr(built, name)}:" in message
    assert "draft_tp_context(owns_attention=True)" in message


def test_a_runner_keeps_all_that_a_scope_may_change(target: Any) -> None:
    """A width that a scope learns to state, and that nobody compares, would be unguarded."""
    with draft_tp_context(owns_attention=True), draft_pp_context():
        stated = {name for name in target._overrides if not name.endswith("_group")}
    assert stated == {field.name for field in fields(ParallelState)}


def test_a_draft_is_at_home_in_its_scope_with_or_without_that_of_the_pipeline(target: Any) -> None:
    built = ParallelState.from_context()
    with draft_tp_context(owns_attention=True), draft_pp_context():
        draft = ParallelState.from_context()
        with pytest.raises(RuntimeError, match=r"built at tp_size 8,.* cannot run at tp_size 2,"):
            built.check_in_force()
    with draft_tp_context(owns_attention=True):
        draft.check_in_force()
    with draft_pp_context():
        built.check_in_force()
    with pytest.raises(RuntimeError, match=r"built at tp_size 2,.* cannot run at tp_size 8,"):
        draft.check_in_force()


def test_the_rank_of_a_width_of_one_is_not_asked_for() -> None:
    """Live ranks: of `attn_dp_rank` nobody knows without a bundle, and of one replica nobody needs to."""
    publish(ServerArgs(model_path="dummy"), role="test")
    with pytest.raises(RuntimeError, match="attn_dp_rank"):
        _ = get_parallel().attn_dp_rank
    assert ParallelState.from_context() == ParallelState()

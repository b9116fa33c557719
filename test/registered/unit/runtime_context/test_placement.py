"""The live placement of one rank as plain values: who answers what, and which settings were replaced."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish
from sglang.srt.runtime_context.parallel import parallel_fields
from sglang.srt.runtime_context.placement import override_log_of, placement_of
from sglang.srt.server_args import ServerArgs

TWO_BY_TWO: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


def _publish(world_rank: int | None = 1, **fields: Any) -> None:
    ranks = None if world_rank is None else SpawnRanks(world_rank=world_rank)
    publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=ranks)


def test_every_name_says_its_value_and_its_layer() -> None:
    _publish(**TWO_BY_TWO)
    group = SimpleNamespace(ranks=[0, 1], world_size=2)
    with (
        patch.object(parallel_state, "get_tp_group", return_value=group),
        patch.object(parallel_state, "get_world_size", return_value=2),
    ):
        names = placement_of(get_context())
        with get_parallel().override(max_ep_size=8):
            assert placement_of(get_context())["max_world_size"] == [8, "scope"]
    assert names["tp_rank"] == [1, "stamp"]
    assert names["attn_dp_rank"] == [1, "stamp"]
    assert names["dp_rank"] == [None, "stamp"]
    assert names["dp_size"] == [2, "published"]
    assert names["attn_tp_size"] == [1, "published"]
    assert names["tp_group"] == [[0, 1], "live"]
    assert names["max_world_size"] == [2, "live"]
    assert names["attn_dcp_rank"] == [0, "published"]  # decode context parallelism is off
    assert json.loads(json.dumps(names)) == names


def test_a_name_that_nobody_can_answer_is_left_out() -> None:
    _publish(world_rank=None, tp_size=2)
    names = placement_of(get_context())
    missing = parallel_fields() - set(names)
    assert {"attn_dp_rank", "dp_rank", "tp_group", "world_group"} <= missing
    assert names["tp_size"] == [2, "published"]
    _publish(tp_size=2)
    assert parallel_fields() - set(placement_of(get_context())) == {
        name for name in parallel_fields() if name.endswith("_group")
    } | {"launch_world_size", "max_world_size"}


def test_nothing_is_known_before_publish() -> None:
    assert placement_of(get_context()) == {}
    assert override_log_of(get_context()) == []


def test_a_group_that_a_scope_takes_away_is_null() -> None:
    _publish(**TWO_BY_TWO)
    with get_parallel().override(moe_ep_group=None):
        assert placement_of(get_context())["moe_ep_group"] == [None, "scope"]


def test_a_computed_name_says_the_layer_of_the_name_whose_value_it_is() -> None:
    _publish(dcp_size=2, tp_size=2)
    names = placement_of(get_context())
    assert names["attn_dcp_rank"] == [get_parallel().dcp_rank, "stamp"]
    assert names["is_attn_tp_leader"] == [False, "stamp"]
    with get_parallel().override(is_attn_tp_leader=True):
        assert placement_of(get_context())["is_attn_tp_leader"] == [True, "scope"]


def test_the_override_log_is_plain_and_hides_secrets() -> None:
    _publish(world_rank=0)
    get_context().override("a test", max_prefill_tokens=99)
    get_context().override("another", api_key="of the crown")
    first, second = override_log_of(get_context())
    assert (first["source"], first["name"], first["after"]) == ("a test", "max_prefill_tokens", 99)
    assert (second["namespace"], second["before"], second["after"]) == ("serving", None, "***")
    assert json.loads(json.dumps([first, second])) == [first, second]


@pytest.mark.parametrize("value", [b"x", {1, 2}, object()])
def test_values_without_a_plain_form_are_shown_as_text(value: Any) -> None:
    _publish(world_rank=0)
    get_context().override("a test", max_prefill_tokens=value)
    (entry,) = override_log_of(get_context())
    assert entry["after"] == repr(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.5, float("-inf")], {"a": float("nan")}])
def test_a_number_that_json_cannot_carry_is_shown_as_text(value: Any) -> None:
    """`NaN` is no JSON: a strict reader refused the whole of /placement for one logged value."""
    _publish(world_rank=0)
    get_context().override("a test", max_prefill_tokens=value)
    with get_parallel().override(dist_timeout=value):
        shown = [override_log_of(get_context()), placement_of(get_context())]
    assert shown == json.loads(json.dumps(shown, allow_nan=False))
    assert any(word in str(shown[0][0]["after"]) for word in ("nan", "inf"))
    with pytest.raises(ValueError, match="Out of range"):  # the twin: what it was shown as before
        json.dumps(value, allow_nan=False)

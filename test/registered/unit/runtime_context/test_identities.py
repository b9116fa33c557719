"""The identities of a layout, each in both directions, and how a violation is told."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.group_layout import GroupSizes
from sglang.srt.runtime_context import (
    SpawnRanks,
    _validate_parallel,
    get_context,
    get_parallel,
    get_schedule,
    publish,
)
from sglang.srt.runtime_context.identities import GROUP_WIDTHS, as_integer
from sglang.srt.runtime_context.widths import WIDTH_LEAVES
from sglang.srt.server_args import ServerArgs

#: Rank 5 of eight: attention 2 x 2 x 2, experts 2 x 2 x 2, decode-context 2, two stages.
WORLD = {
    "tp_size": 8, "pp_size": 2, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2,
    "ep_size": 2, "moe_dp_size": 2, "dcp_size": 2,
}  # fmt: skip


@pytest.fixture
def parallel() -> Any:
    publish(ServerArgs(model_path="dummy", **WORLD), role="test", ranks=SpawnRanks(world_rank=5))
    return get_parallel()


def _violations(parallel: Any, **names: Any) -> list[str]:
    """The listed rules, with `names` written past every check."""
    parallel._overrides.update(names)
    try:
        _validate_parallel(parallel, "a test")
    except ValueError as error:
        first, *rules = str(error).splitlines()
        assert first.startswith("set by a test")
        return [rule.removeprefix("  - ") for rule in rules if rule.startswith("  - ")]
    finally:
        parallel._overrides.clear()
    return []


def test_a_published_layout_is_quiet(parallel: Any) -> None:
    assert _violations(parallel) == []


@pytest.mark.parametrize(
    "names, rule",
    [
        (
            {"attn_tp_size": 4, "attn_dp_rank": 0, "attn_cp_rank": 1},  # still the same seat
            "tp_size == attn_tp_size * attn_dp_size * attn_cp_size: 8 != 4 * 2 * 2",
        ),
        ({"attn_dp_size": 4}, "tp_size == attn_tp_size * attn_dp_size * attn_cp_size: 8 != 2 * 4 * 2"),
        ({"moe_tp_size": 4}, "tp_size == moe_ep_size * moe_dp_size * moe_tp_size: 8 != 2 * 2 * 4"),
        ({"moe_ep_size": 4}, "tp_size == moe_ep_size * moe_dp_size * moe_tp_size: 8 != 4 * 2 * 2"),
        ({"moe_dp_size": 4}, "tp_size == moe_ep_size * moe_dp_size * moe_tp_size: 8 != 2 * 4 * 2"),
        ({"pp_rank": 2}, "0 <= pp_rank < pp_size: rank 2, width 2"),
        ({"dcp_rank": 2}, "0 <= dcp_rank < dcp_size: rank 2, width 2"),
        ({"moe_ep_rank": -1}, "0 <= moe_ep_rank < moe_ep_size: rank -1, width 2"),
        ({"moe_dp_rank": 2}, "0 <= moe_dp_rank < moe_dp_size: rank 2, width 2"),
        ({"moe_tp_rank": 2}, "0 <= moe_tp_rank < moe_tp_size: rank 2, width 2"),
        ({"launch_world_size": 5}, "0 <= launch_world_rank < launch_world_size: rank 5, width 5"),
    ],
)
def test_one_wrong_number_breaks_exactly_its_identity(
    parallel: Any, names: dict[str, Any], rule: str
) -> None:
    assert _violations(parallel, **names) == [rule]


@pytest.mark.parametrize(
    "name, low, high",
    [("tp_rank", -1, 8), ("attn_tp_rank", -1, 2), ("attn_cp_rank", -1, 2), ("attn_dp_rank", -1, 2)],
)
def test_a_rank_outside_its_width_is_told_together_with_the_seat_it_breaks(
    parallel: Any, name: str, low: int, high: int
) -> None:
    for value in (low, high):
        told = _violations(parallel, **{name: value})
        assert told[0].startswith(f"0 <= {name} < {name.replace('rank', 'size')}: rank {value}")
        assert "(attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank" in told[1]


def test_the_seat_shows_both_sides(parallel: Any) -> None:
    assert _violations(parallel, attn_dp_rank=0) == [
        "tp_rank == (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank: "
        "5 != (0 * 2 + 0) * 2 + 1"
    ]


def test_every_violation_is_in_one_error_in_a_fixed_order(parallel: Any) -> None:
    """Factors, ranges, seat, groups: a reader fixes a layout once, not one complaint at a time."""
    told = _violations(
        parallel, attn_tp_size=3, moe_tp_size=3, pp_rank=9, tp_rank=2, tp_group=SimpleNamespace(world_size=6)
    )
    heads = [line.split(":")[0] for line in told]
    assert heads == [
        "tp_size == attn_tp_size * attn_dp_size * attn_cp_size",
        "tp_size == moe_ep_size * moe_dp_size * moe_tp_size",
        "attn_tp_size % dcp_size == 0",
        "0 <= pp_rank < pp_size",
        "tp_rank == (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank",
        "tp_group.world_size == tp_size",
    ]


@pytest.mark.parametrize("unreadable", [None, "4", 4.0, True, object()])
def test_a_term_that_is_no_plain_integer_skips_its_identities_whole(parallel: Any, unreadable: Any) -> None:
    """`True == 1` would let a flag pass for a width; a skipped identity must not fail either."""
    told = _violations(parallel, attn_tp_size=unreadable, tp_rank=99)
    assert told == ["0 <= tp_rank < tp_size: rank 99, width 8"]


def test_a_half_initialised_process_can_be_checked(parallel: Any) -> None:
    """Nothing published, no group: every identity has a term that raises, so nothing is claimed."""
    from sglang.srt.runtime_context import ParallelContext

    _validate_parallel(ParallelContext(), "a test")
    lone = ParallelContext()
    lone._overrides.update(tp_size=4, attn_tp_size=3, attn_dp_size=1)  # attn_cp_size is not known
    _validate_parallel(lone, "a test")
    lone._overrides.update(attn_cp_size=1)
    with pytest.raises(ValueError, match=r"4 != 3 \* 1 \* 1"):
        _validate_parallel(lone, "a test")


class _Counts:
    """Whatever may be used as an index."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def test_integers_of_numpy_and_torch_are_checked_like_those_of_python(parallel: Any) -> None:
    """A rank out of a tensor skipped every identity, so that any number passed."""
    rule = "0 <= pp_rank < pp_size: rank 9, width 2"
    for rank in (
        9,
        np.int64(9),
        np.uint8(9),
        np.array(9),
        torch.tensor(9),
        torch.tensor(9, dtype=torch.int8),
        torch.tensor([9]),
        _Counts(9),
    ):
        assert as_integer(rank) == 9 and type(as_integer(rank)) is int
        assert _violations(parallel, pp_rank=rank) == [rule], repr(rank)
        assert _violations(parallel, pp_rank=rank, pp_size=10) == []
    for no_integer in (
        np.bool_(True),
        torch.tensor(True),
        torch.tensor(9.0),
        torch.tensor([8, 9]),
        torch.tensor([True]),
        np.array([8, 9]),
        np.array(True),
        np.float32(9),
    ):
        assert as_integer(no_integer) is None, repr(no_integer)
        assert _violations(parallel, pp_rank=no_integer) == []
    group = SimpleNamespace(world_size=np.int64(6), rank_in_group=np.int64(5))
    assert _violations(parallel, tp_group=group) == [
        "tp_group.world_size == tp_size: built 6, configured 8",
    ]


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({"tp_size": 4, "dcp_size": 3}, "attn_tp_size % dcp_size == 0: 4 % 3 == 1"),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "dcp_size": 4}, "2 % 4 == 2"),
        (
            {"tp_size": 4, "pp_size": 2, "max_ep_size": 7},
            "max_ep_size >= ep_join_rank_offset + tp_size * pp_size: 7 < 0 + 4 * 2",
        ),
        ({"tp_size": 4, "ep_join_rank_offset": 4, "max_ep_size": 7}, "7 < 4 + 4 * 1"),
    ],
)
def test_stripes_that_do_not_divide_and_a_world_without_room_are_refused_at_publish(
    fields: dict[str, Any], rule: str
) -> None:
    """They were found only when the groups were cut, or never."""
    with pytest.raises(ValueError, match="(?s)set by publish.*" + re.escape(rule)) as caught:
        publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=None)
    assert len(str(caught.value).splitlines()) == 3  # this rule and no other
    fitting = {**fields, "dcp_size": min(fields.get("dcp_size", 1), 2), "max_ep_size": 8}
    publish(ServerArgs(model_path="dummy", **fitting), role="test", ranks=None)


#: All that counts as an integer.
KINDS: list[Callable[[int], Any]] = [int, np.int64, np.array, torch.tensor, _Counts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WIDTH_LEAVES)
def test_a_width_below_one_is_refused_at_publish_of_whatever_kind_it_is(
    name: str, kind: Callable[[int], Any]
) -> None:
    """A zero of numpy divided by zero, or described no layout, and was published."""
    for low in (0, -3):
        with pytest.raises(ValueError, match=f"{name} >= 1: got {low}"):
            get_context().override_server_args(**{name: kind(low)}).install()
        assert get_context().publication is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_stamped_or_stated_as_an_integer_is_read_as_a_plain_one(
    kind: Callable[[int], Any],
) -> None:
    with get_context().override_server_args(tp_size=kind(4), page_size=kind(2)):
        parallel = get_parallel()
        parallel.override_permanently(pp_size=kind(2), nccl_port=kind(5))
        with parallel.override(node_rank=kind(1), tp_rank=kind(3), attn_tp_rank=kind(3)):
            read = [parallel.tp_size, parallel.attn_tp_size, parallel.moe_tp_size, get_schedule().page_size]
            read += [parallel.pp_size, parallel.nccl_port, parallel.node_rank, parallel.tp_rank]
        get_context().override("a test", page_size=kind(8))
        read += [get_schedule().page_size, get_context().overrides_log()[0].after]
    assert read == [4, 4, 4, 2, 2, 5, 1, 3, 8, 8]
    assert {type(value) for value in read} == {int}


def _refusals(parallel: Any, **names: Any) -> list[list[str]]:
    """What a scope and a stamp of these names are refused with; an empty list where one is let through."""

    def rules(error: ValueError) -> list[str]:
        return [line.removeprefix("  - ") for line in str(error).splitlines() if line.startswith("  - ")]

    told: list[list[str]] = []
    try:
        with parallel.override(**names):
            told.append([])
    except ValueError as error:
        told.append(rules(error))
    before = dict(parallel._stamp)
    try:
        parallel.override_permanently(**names)
        told.append([])
    except ValueError as error:
        told.append(rules(error))
    assert told[-1] == [] or parallel._stamp == before
    parallel.put(parallel._config, before)
    return told


#: Beside rank 5 of `WORLD`: what is stated, the rule that it breaks, and what may be stated instead.
STATED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"pp_size": -1}, "pp_size >= 1: got -1", {"pp_size": 3}),
    ({"dcp_size": 0}, "dcp_size >= 1: got 0", {"dcp_size": 2}),
    ({"dp_size": -3}, "dp_size >= 1: got -3", {"dp_size": 3}),
    ({"launch_world_size": 0}, "launch_world_size >= 1: got 0", {"launch_world_size": 16}),
    ({"max_world_size": -1}, "max_world_size >= 1: got -1", {"max_world_size": 16}),
    ({"launch_world_rank": -5}, "launch_world_rank >= 0: got -5", {"launch_world_rank": 6}),
    ({"dp_rank": -3}, "0 <= dp_rank < dp_size: rank -3, width 2", {"dp_rank": 1}),
    ({"dp_rank": 2}, "0 <= dp_rank < dp_size: rank 2, width 2", {"dp_rank": 2, "dp_size": 3}),
    ({"dp_rank": -3, "dp_size": 1}, "dp_rank >= 0: got -3", {"dp_rank": 17, "dp_size": 1}),
    ({"attn_dcp_rank": 2}, "0 <= attn_dcp_rank < attn_dcp_size: rank 2, width 2", {"attn_dcp_rank": 0}),
    ({"gpu_id": -7}, "gpu_id >= 0: got -7", {"gpu_id": None}),
    ({"ep_size": 4}, "ep_size == moe_ep_size: 4 != 2", {"ep_size": 2}),
    (
        {"dcp_size": 1, "dcp_rank": 0},
        "dcp_enabled == (dcp_size > 1): True with dcp_size 1",
        {"dcp_size": 1, "dcp_rank": 0, "dcp_enabled": False},
    ),
]  # fmt: skip


@pytest.mark.parametrize("names, rule, fitting", STATED)
def test_a_scope_and_a_stamp_are_held_to_the_widths_ranks_and_settings_beside_them(
    parallel: Any, names: dict[str, Any], rule: str, fitting: dict[str, Any]
) -> None:
    """Each was accepted and read; only products and ranks beside a known width were looked at."""
    for told in _refusals(parallel, **names):
        assert rule in told
    assert _refusals(parallel, **fitting) == [[], []]


def test_widths_that_multiply_out_below_one_are_refused(parallel: Any) -> None:
    """Zero is zero times zero, so that every product held."""
    for low in (0, -8):
        for told in _refusals(parallel, tp_size=low, attn_tp_size=low // 4, moe_tp_size=low // 4):
            expected = {"tp_size": low, "attn_tp_size": low // 4, "moe_tp_size": low // 4}
            assert told[:3] == [f"{name} >= 1: got {width}" for name, width in expected.items()]


def test_a_spawned_rank_lies_within_the_replicas() -> None:
    record = ServerArgs(model_path="dummy", dp_size=2)
    with pytest.raises(ValueError, match=r"set by publish(?s:.*)0 <= dp_rank < dp_size: rank 7, width 2"):
        publish(record, role="test", ranks=SpawnRanks(dp_rank=7))
    publish(record, role="test", ranks=SpawnRanks(dp_rank=1))


def test_a_scope_may_switch_decode_context_off_and_a_draft_has_experts_of_its_own(parallel: Any) -> None:
    """Named by the scope itself it is no slip; a stamp that says both contradicts itself for good."""
    off = {"dcp_size": 2, "dcp_enabled": False}
    rule = "dcp_enabled == (dcp_size > 1): False with dcp_size 2"
    assert _refusals(parallel, **off) == [[], [rule]]
    assert _refusals(parallel, moe_ep_size=1, moe_ep_rank=0, moe_tp_size=4, moe_tp_rank=1) == [[], []]


def test_a_stated_world_rank_is_compared_with_a_world_that_was_built(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _refusals(parallel, launch_world_rank=3) == [[], []]  # no world stands here
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(world_size=16, rank_in_group=5))
    rule = "world_group.rank_in_group == launch_world_rank: built 5, stated 3"
    assert _refusals(parallel, launch_world_rank=3) == [[rule], [rule]]
    assert _refusals(parallel, launch_world_rank=5) == [[], []]
    assert _refusals(parallel, pp_rank=1) == [[], []]


@pytest.mark.parametrize("group", sorted(GROUP_WIDTHS))
def test_every_built_group_is_compared_with_its_own_width_and_rank(
    parallel: Any, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, rank = (getattr(parallel, name) for name in GROUP_WIDTHS[group])
    slot = f"_{group.removesuffix('_group').upper()}"
    monkeypatch.setattr(parallel_state, slot, SimpleNamespace(world_size=size, rank_in_group=rank))
    assert _violations(parallel) == []
    monkeypatch.setattr(parallel_state, slot, SimpleNamespace(world_size=size + 1, rank_in_group=rank))
    assert _violations(parallel) == [
        f"{group}.world_size == {GROUP_WIDTHS[group][0]}: built {size + 1}, configured {size}"
    ]
    monkeypatch.setattr(parallel_state, slot, SimpleNamespace(world_size=size, rank_in_group=rank + 1))
    assert _violations(parallel) == [
        f"{group}.rank_in_group == {GROUP_WIDTHS[group][1]}: built {rank + 1}, configured {rank}"
    ]


def test_the_same_rule_is_kept_by_the_layout_arithmetic() -> None:
    """Checked twice on purpose: what the context lets pass must be what the groups can be cut into."""
    with pytest.raises(ValueError, match=r"8 != 2 \* 2 \* 4"):
        GroupSizes(tp_size=8, attn_dp_size=2, attn_cp_size=2, attn_tp_size=4, moe_tp_size=8)

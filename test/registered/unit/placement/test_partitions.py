"""When two kinds of groups cut the ranks alike, and what then becomes one."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

from sglang.srt.placement.plan import Group, partitions, plan_from_flags


def _labels(flags: str) -> list[str]:
    return [cut.label for cut in partitions(plan_from_flags(flags.split(), prog="test").groups)]


@pytest.mark.parametrize(
    "flags, labels",
    [
        ("", []),
        ("--tp-size 4", ["tp = attn_tp = moe_tp"]),
        ("--tp-size 2 --attn-dp-size 2", ["tp = moe_tp", "attn_dp"]),
        ("--tp-size 4 --attn-dp-size 2", ["tp = moe_tp", "attn_dp", "attn_tp"]),
        ("--tp-size 4 --ep-size 4 --dcp-size 4", ["tp = attn_tp = dcp = moe_ep"]),
        ("--tp-size 4 --attn-cp-size 2 --moe-dp-size 2", ["tp", "attn_cp = moe_dp", "attn_tp = moe_tp"]),
        ("--pp-size 2", ["pp"]),
    ],
)
def test_equal_partitions_become_one_at_the_place_of_the_first(flags: str, labels: list[str]) -> None:
    assert _labels(flags) == labels


def _group(kind: str, *lists: list[int], collective: bool = True) -> Group:
    return Group(kind=kind, width=len(lists[0]), lists=lists, collective=collective)


def test_only_the_same_lists_in_the_same_order_are_equal() -> None:
    """A rank must have one place in all that is shown as one; each of these differs in one thing only."""
    first = _group("tp", [0, 1], [2, 3])
    for other in (
        _group("dcp", [0, 2], [1, 3]),
        _group("dcp", [1, 0], [2, 3]),
        _group("dcp", [2, 3], [0, 1]),
        _group("attn_dp", [0, 1], [2, 3], collective=False),
    ):
        assert [cut.kinds for cut in partitions([first, other])] == [["tp"], [other.kind]]
    (same,) = partitions([first, _group("dcp", [0, 1], [2, 3])])
    assert (same.kinds, same.width, same.lists, same.collective) == (["tp", "dcp"], 2, first.lists, True)


def test_kinds_of_one_rank_a_group_are_no_partition() -> None:
    assert partitions([_group("dcp", [0], [1])]) == []

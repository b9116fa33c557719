"""The layout against a reference that knows the rank formulas only, and against the stamps of processes."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.distributed import group_layout
from sglang.srt.distributed.group_layout import Groups, GroupSizes, attn_dp_replicas, layout
from sglang.srt.runtime_context.publication import SpawnRanks, build_publication
from sglang.srt.server_args import ServerArgs

#: Kind -> the coordinates that its members share. Everything else follows from the two formulas.
SHARED: dict[str, tuple[str, ...]] = {
    "tp": ("pp",),
    "pp": ("tp",),
    "attn_dp": ("pp", "attn_dp"),
    "attn_cp": ("pp", "attn_dp", "attn_tp"),
    "attn_tp": ("pp", "attn_dp", "attn_cp"),
    "dcp": ("pp", "attn_dp", "attn_cp", "stripe_block"),
    "moe_dp": ("pp", "moe_ep", "moe_tp"),
    "moe_ep": ("pp", "moe_dp", "moe_tp"),
    "moe_tp": ("pp", "moe_dp", "moe_ep"),
    "self_pp": ("world",),
}


def coordinates(sizes: GroupSizes) -> list[dict[str, int]]:
    """Every rank's coordinates, found by trying all of them: no division, no remainder, no stride."""
    seats: list[dict[str, int]] = []
    for pp, tp in product(range(sizes.pp_size), range(sizes.tp_size)):
        seat = {"pp": pp, "tp": tp, "world": sizes.offset + sizes.tp_size * pp + tp}
        for dp, cp, at in product(
            range(sizes.attn_dp_size), range(sizes.attn_cp_size), range(sizes.attn_tp_size)
        ):
            if tp == (dp * sizes.attn_cp_size + cp) * sizes.attn_tp_size + at:
                seat |= {"attn_dp": dp, "attn_cp": cp, "attn_tp": at}
                blocks = product(range(sizes.attn_tp_size), range(sizes.dcp_size))
                (seat["stripe_block"], seat["dcp"]) = next(
                    (block, stripe) for block, stripe in blocks if at == block * sizes.dcp_size + stripe
                )
        for dp, ep, mt in product(
            range(sizes.moe_dp_size), range(sizes.moe_ep_size), range(sizes.moe_tp_size)
        ):
            if tp == (dp * sizes.moe_ep_size + ep) * sizes.moe_tp_size + mt:
                seat |= {"moe_dp": dp, "moe_ep": ep, "moe_tp": mt}
        seats.append(seat)
    return seats


def reference(sizes: GroupSizes) -> dict[str, Groups]:
    """Ranks that share the coordinates of a kind, in the order of their world ranks."""
    found: dict[str, Groups] = {}
    for kind, shared in SHARED.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for seat in coordinates(sizes):
            groups.setdefault(tuple(seat[name] for name in shared), []).append(seat["world"])
        found[kind] = sorted(groups.values())
    return found


def computed(sizes: GroupSizes) -> dict[str, Groups]:
    return {**layout(sizes), "attn_dp": attn_dp_replicas(sizes)}


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@st.composite
def layouts(draw: Any) -> GroupSizes:
    """Any tensor width up to 36, cut at random in both number systems."""
    tp_size = draw(st.integers(1, 36))
    attn_dp = draw(st.sampled_from(_divisors(tp_size)))
    attn_cp = draw(st.sampled_from(_divisors(tp_size // attn_dp)))
    attn_tp = tp_size // attn_dp // attn_cp
    moe_dp = draw(st.sampled_from(_divisors(tp_size)))
    moe_ep = draw(st.sampled_from(_divisors(tp_size // moe_dp)))
    return GroupSizes(
        tp_size=tp_size,
        pp_size=draw(st.integers(1, 4)),
        attn_dp_size=attn_dp,
        attn_cp_size=attn_cp,
        attn_tp_size=attn_tp,
        moe_dp_size=moe_dp,
        moe_ep_size=moe_ep,
        moe_tp_size=tp_size // moe_dp // moe_ep,
        dcp_size=draw(st.sampled_from(_divisors(attn_tp))),
        offset=draw(st.integers(0, 40)),
    )


@settings(max_examples=60)
@given(layouts())
def test_every_kind_is_cut_as_the_formulas_say(sizes: GroupSizes) -> None:
    assert computed(sizes) == reference(sizes)


@settings(max_examples=60)
@given(layouts())
def test_each_kind_divides_the_world_into_groups_of_its_width(sizes: GroupSizes) -> None:
    world = list(range(sizes.offset, sizes.offset + sizes.ranks))
    widths = {f"{kind}_size": 0 for kind in layout(sizes)} | vars(sizes)
    widths["self_pp_size"] = 1
    for kind, groups in layout(sizes).items():
        assert sorted(rank for group in groups for rank in group) == world, kind
        assert {len(group) for group in groups} == {widths[f"{kind}_size"]}, kind
        assert all(group == sorted(group) for group in groups), kind
    replicas = attn_dp_replicas(sizes)
    assert sorted(rank for replica in replicas for rank in replica) == world
    assert len(replicas) == sizes.attn_dp_size * sizes.pp_size


@settings(max_examples=25)
@given(layouts())
def test_what_a_process_is_stamped_is_its_place_in_its_groups(sizes: GroupSizes) -> None:
    """From flags on, over the path of a real process: the record, publish, the stamps."""
    record = ServerArgs(
        model_path="none",
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        dp_size=sizes.attn_dp_size,
        enable_dp_attention=sizes.attn_dp_size > 1,
        attn_cp_size=sizes.attn_cp_size,
        ep_size=sizes.moe_ep_size,
        moe_dp_size=sizes.moe_dp_size,
        dcp_size=sizes.dcp_size,
        ep_join_rank_offset=sizes.offset,
    )
    cut = layout(sizes)
    for seat in coordinates(sizes):
        rank = seat["world"]
        published = build_publication(record, role=None, ranks=SpawnRanks(world_rank=rank))
        assert {name: published.config[name] for name in vars(sizes) if name != "offset"} == {
            name: value for name, value in vars(sizes).items() if name != "offset"
        }
        for kind in SHARED:
            if kind not in ("self_pp", "attn_dp"):
                mine = next(group for group in cut[kind] if rank in group)
                assert published.stamp[f"{kind}_rank"] == mine.index(rank) == seat[kind], (kind, rank)
        assert published.stamp["attn_dp_rank"] == seat["attn_dp"]


@pytest.mark.parametrize("outside", [1, 4])
def test_a_world_rank_outside_its_cohort_has_no_seat(outside: int) -> None:
    """The offset is subtracted first: of two ranks from 2 on, 1 and 4 are outside."""
    record = ServerArgs(model_path="none", tp_size=2, ep_join_rank_offset=2)
    inside = build_publication(record, role=None, ranks=SpawnRanks(world_rank=3))
    assert inside.stamp["tp_rank"] == 1
    with pytest.raises(ValueError, match="outside the deployment"):
        build_publication(record, role=None, ranks=SpawnRanks(world_rank=outside))


EXAMPLE = GroupSizes(
    tp_size=16, pp_size=2, attn_dp_size=2, attn_cp_size=2, attn_tp_size=4, dcp_size=2,
    moe_dp_size=2, moe_ep_size=4, moe_tp_size=2, offset=3,
)  # fmt: skip


def _blocks(width: int) -> Callable[[GroupSizes], Groups]:
    ranks = range(EXAMPLE.offset, EXAMPLE.offset + EXAMPLE.ranks)
    return lambda sizes: [list(ranks[at : at + width]) for at in range(0, len(ranks), width)]


def _strided(width: int, stride: int) -> Callable[[GroupSizes], Groups]:
    ranks = list(range(EXAMPLE.offset, EXAMPLE.offset + EXAMPLE.ranks))
    block = width * stride
    return lambda sizes: [
        ranks[start + inner : start + block : stride]
        for start in range(0, len(ranks), block)
        for inner in range(stride)
    ]


@pytest.mark.parametrize(
    "kind, cut",
    [
        ("tp", _strided(16, 2)),
        ("pp", _blocks(2)),
        ("attn_tp", _strided(4, 4)),
        ("attn_cp", _blocks(2)),
        ("dcp", _strided(2, 2)),
        ("moe_dp", _blocks(2)),
        ("moe_ep", _blocks(4)),
        ("moe_tp", _strided(2, 4)),
        ("self_pp", lambda sizes: [[rank] for rank in range(sizes.ranks)]),
    ],
)
def test_a_plausible_wrong_cut_of_any_kind_is_noticed(kind: str, cut: Callable[[GroupSizes], Groups]) -> None:
    """Right widths, every rank once, the wrong neighbours: the mistake that no count would find."""
    assert computed(EXAMPLE) == reference(EXAMPLE)
    with patch.dict(group_layout._CUTS, {kind: cut}):
        assert computed(EXAMPLE)[kind] != reference(EXAMPLE)[kind]

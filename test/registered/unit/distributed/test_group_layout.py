"""The arithmetic of ranks: golden lists, and agreement with the ranks that publish stamps."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.distributed import group_layout
from sglang.srt.distributed.group_layout import GroupSizes, attn_dp_replicas, layout
from sglang.srt.runtime_context.widths import derive_attention_ranks, derive_expert_ranks, derive_stage_ranks

EXAMPLE = GroupSizes(
    tp_size=8, pp_size=2, attn_dp_size=2, attn_cp_size=2, attn_tp_size=2, moe_dp_size=2, moe_ep_size=4
)

#: The table of the worked example, written out.
GOLDEN = {
    "tp": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
    "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    "attn_tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "attn_cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "moe_dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "moe_ep": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "moe_tp": [[rank] for rank in range(16)],
    "dcp": [[rank] for rank in range(16)],
    "self_pp": [[rank] for rank in range(16)],
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_worked_example_is_cut_as_written_out(name: str) -> None:
    assert layout(EXAMPLE)[name] == GOLDEN[name]


def test_the_tensor_group_is_built_first_and_every_group_is_there() -> None:
    assert next(iter(layout(EXAMPLE))) == "tp"
    assert set(layout(EXAMPLE)) == set(GOLDEN)


def test_replicas_of_the_worked_example() -> None:
    assert attn_dp_replicas(EXAMPLE) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


#: Whole layouts for the dimensions that the worked example leaves one wide, and for odd widths.
WRITTEN_OUT: list[tuple[dict[str, int], dict[str, list[list[int]]]]] = [
    (
        {"tp_size": 4, "attn_dp_size": 2, "attn_tp_size": 2, "moe_ep_size": 2, "moe_tp_size": 2},
        {
            "tp": [[0, 1, 2, 3]],
            "pp": [[0], [1], [2], [3]],
            "attn_tp": [[0, 1], [2, 3]],
            "attn_cp": [[0], [1], [2], [3]],
            "attn_dp": [[0, 1], [2, 3]],
            "dcp": [[0], [1], [2], [3]],
            "moe_dp": [[0], [1], [2], [3]],
            "moe_ep": [[0, 2], [1, 3]],
            "moe_tp": [[0, 1], [2, 3]],
            "self_pp": [[0], [1], [2], [3]],
        },
    ),
    (
        dict(tp_size=8, attn_tp_size=8, dcp_size=4, moe_dp_size=2, moe_ep_size=2, moe_tp_size=2),
        {
            "tp": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "attn_tp": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "attn_dp": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "dcp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "moe_dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "moe_ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "moe_tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        },
    ),
    (
        {"tp_size": 6, "attn_cp_size": 3, "attn_tp_size": 2, "moe_ep_size": 3, "moe_dp_size": 2, "offset": 6},
        {
            "tp": [[6, 7, 8, 9, 10, 11]],
            "attn_tp": [[6, 7], [8, 9], [10, 11]],
            "attn_cp": [[6, 8, 10], [7, 9, 11]],
            "attn_dp": [[6, 7, 8, 9, 10, 11]],
            "moe_dp": [[6, 9], [7, 10], [8, 11]],
            "moe_ep": [[6, 7, 8], [9, 10, 11]],
            "moe_tp": [[6], [7], [8], [9], [10], [11]],
            "self_pp": [[6], [7], [8], [9], [10], [11]],
        },
    ),
    (
        {
            "tp_size": 4, "pp_size": 3, "attn_dp_size": 2, "attn_tp_size": 2, "dcp_size": 2, "moe_tp_size": 4,
        },
        {
            "tp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
            "pp": [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]],
            "attn_tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
            "attn_dp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
            "dcp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
            "moe_tp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("sizes, written", WRITTEN_OUT)
def test_more_whole_layouts_are_cut_as_written_out(
    sizes: dict[str, int], written: dict[str, list[list[int]]]
) -> None:
    cut = GroupSizes(**sizes)
    computed = {**layout(cut), "attn_dp": attn_dp_replicas(cut)}
    assert {name: computed[name] for name in written} == written


@pytest.mark.parametrize(
    "sizes, name, groups",
    [
        ({"tp_size": 4, "attn_tp_size": 4, "moe_ep_size": 2, "moe_tp_size": 2}, "moe_ep", [[0, 2], [1, 3]]),
        ({"tp_size": 4, "attn_tp_size": 4, "moe_ep_size": 2, "moe_tp_size": 2}, "moe_tp", [[0, 1], [2, 3]]),
        ({"tp_size": 4, "attn_tp_size": 4, "moe_dp_size": 2, "moe_tp_size": 2}, "moe_dp", [[0, 2], [1, 3]]),
        (
            {"tp_size": 8, "attn_dp_size": 2, "attn_tp_size": 4, "moe_tp_size": 8, "dcp_size": 2},
            "dcp",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        (
            {"tp_size": 2, "pp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "offset": 8},
            "tp",
            [[8, 9], [10, 11]],
        ),
        (
            {"tp_size": 2, "pp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "offset": 8},
            "pp",
            [[8, 10], [9, 11]],
        ),
        ({"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "offset": 8}, "self_pp", [[8], [9]]),
    ],
)
def test_smaller_layouts_written_out(sizes: dict[str, int], name: str, groups: list[list[int]]) -> None:
    assert layout(GroupSizes(**sizes))[name] == groups


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"tp_size": 8, "attn_tp_size": 8, "moe_tp_size": 4}, r"8 != 1 \* 1 \* 4"),
        ({"tp_size": 8, "attn_tp_size": 3, "moe_tp_size": 8}, r"8 != 1 \* 1 \* 3"),
        (
            {"tp_size": 4, "attn_tp_size": 4, "moe_tp_size": 4, "dcp_size": 3},
            r"dcp_size must divide .* 4 % 3 != 0",
        ),
        ({"pp_size": 0}, "pp_size must be at least 1, got 0"),
        ({"offset": -1}, "offset must be at least 0, got -1"),
    ],
)
def test_sizes_that_are_no_layout_are_refused_with_the_numbers(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GroupSizes(**sizes)


_WIDTH = st.sampled_from([1, 2, 3])


@st.composite
def _layouts(draw: Any) -> GroupSizes:
    attn_dp, attn_cp, attn_tp = draw(_WIDTH), draw(_WIDTH), draw(st.sampled_from([1, 2, 4]))
    tp_size = attn_dp * attn_cp * attn_tp
    moe_ep = draw(st.sampled_from([n for n in range(1, tp_size + 1) if tp_size % n == 0]))
    rest = tp_size // moe_ep
    moe_dp = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return GroupSizes(
        tp_size=tp_size,
        pp_size=draw(_WIDTH),
        attn_dp_size=attn_dp,
        attn_cp_size=attn_cp,
        attn_tp_size=attn_tp,
        moe_dp_size=moe_dp,
        moe_ep_size=moe_ep,
        moe_tp_size=rest // moe_dp,
        dcp_size=draw(st.sampled_from([n for n in (1, 2, 4) if attn_tp % n == 0])),
        offset=draw(st.sampled_from([0, 5])),
    )


@settings(max_examples=60)
@given(_layouts())
def test_every_rank_is_in_one_group_of_a_kind_at_the_seat_that_publish_stamps(sizes: GroupSizes) -> None:
    """Two spellings of one layout, lists here and digits in `widths.py`: a rank must find itself where both
    say."""
    cut = layout(sizes)
    for world_rank in range(sizes.offset, sizes.offset + sizes.ranks):
        pp_rank, tp_rank = derive_stage_ranks(
            world_rank=world_rank, tp_size=sizes.tp_size, pp_size=sizes.pp_size, offset=sizes.offset
        )
        attention = derive_attention_ranks(
            tp_rank=tp_rank,
            attn_tp_size=sizes.attn_tp_size,
            attn_cp_size=sizes.attn_cp_size,
            dcp_size=sizes.dcp_size,
        )
        experts = derive_expert_ranks(
            tp_rank=tp_rank, moe_ep_size=sizes.moe_ep_size, moe_tp_size=sizes.moe_tp_size
        )
        stamped = {
            "tp_rank": tp_rank,
            "pp_rank": pp_rank,
            "self_pp_rank": 0,
            **vars(attention),
            **vars(experts),
        }
        replica = stamped.pop("attn_dp_rank")
        for name, groups in cut.items():
            mine = [group for group in groups if world_rank in group]
            assert len(mine) == 1, (name, world_rank)
            assert mine[0].index(world_rank) == stamped[f"{name}_rank"], (name, world_rank)
        replicas = attn_dp_replicas(sizes)[pp_rank * sizes.attn_dp_size : (pp_rank + 1) * sizes.attn_dp_size]
        assert world_rank in replicas[replica]


def test_a_shifted_cut_is_noticed() -> None:
    """The twin of the golden lists: a plausible other order (experts fastest) is not what they say."""
    swapped = [[0, 1], [2, 3]]
    assert layout(GroupSizes(tp_size=4, attn_tp_size=4, moe_ep_size=2, moe_tp_size=2))["moe_ep"] != swapped


def test_the_arithmetic_needs_no_torch() -> None:
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('layout', {group_layout.__file__!r}); "
        "module = importlib.util.module_from_spec(spec); sys.modules['layout'] = module; "
        "spec.loader.exec_module(module); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Owns the layout of ranks: sizes in, lists of world ranks out.

Read by the group build, the placement printer and the tests. Pure arithmetic: must not import torch, ask a
process group or read the context. Every function is shown on `tp=8, pp=2, attn_dp=2, attn_cp=2, ep=4,
moe_dp=2`.

Inside one pipeline stage the tensor rank is written in two number systems at once, slowest digit first:

    attention   tp_rank = (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank
    experts     tp_rank = (moe_dp_rank * moe_ep_size + moe_ep_rank) * moe_tp_size + moe_tp_rank

and over stages `world_rank = offset + tp_size * pp_rank + tp_rank`. A group is the set of ranks that
differ in one digit only.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

__all__ = [
    "GroupSizes",
    "attn_cp_groups",
    "attn_dp_replicas",
    "attn_tp_groups",
    "dcp_groups",
    "layout",
    "moe_dp_groups",
    "moe_ep_groups",
    "moe_tp_groups",
    "pp_groups",
    "self_pp_groups",
    "tp_groups",
]

Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """The widths of one deployment; `offset` is the first world rank of this cohort (elastic joiners)."""

    tp_size: int = 1
    pp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    attn_tp_size: int = 1
    moe_dp_size: int = 1
    moe_ep_size: int = 1
    moe_tp_size: int = 1
    dcp_size: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 0 if field.name == "offset" else 1
            value = getattr(self, field.name)
            if value < low:
                raise ValueError(f"{field.name} must be at least {low}, got {value}")
        self._factor("attn_dp_size", "attn_cp_size", "attn_tp_size")
        self._factor("moe_dp_size", "moe_ep_size", "moe_tp_size")
        if self.attn_tp_size % self.dcp_size:
            raise ValueError(
                f"dcp_size must divide attn_tp_size: {self.attn_tp_size} % {self.dcp_size} != 0; "
                "a decode-context group lies inside one attention-TP group"
            )

    def _factor(self, *names: str) -> None:
        product = 1
        for name in names:
            product *= getattr(self, name)
        if product != self.tp_size:
            right = " * ".join(str(getattr(self, name)) for name in names)
            raise ValueError(f"tp_size == {' * '.join(names)} does not hold: {self.tp_size} != {right}")

    @property
    def ranks(self) -> int:
        """World ranks of this cohort."""
        return self.tp_size * self.pp_size

    def stage_starts(self) -> list[int]:
        """First world rank of each pipeline stage: `[0, 8]`."""
        return [self.offset + stage * self.tp_size for stage in range(self.pp_size)]


def _inside_stages(sizes: GroupSizes, one_stage: Groups) -> Groups:
    return [[start + rank for rank in group] for start in sizes.stage_starts() for group in one_stage]


def _digit_groups(slow: int, width: int, fast: int) -> Groups:
    """Groups over the middle digit of `slow x width x fast`: strided by `fast`, one per (slow, fast) pair."""
    return [
        [(outer * width + digit) * fast + inner for digit in range(width)]
        for outer in range(slow)
        for inner in range(fast)
    ]


def tp_groups(sizes: GroupSizes) -> Groups:
    """Contiguous blocks of `tp_size`: `[0..7] [8..15]`."""
    return _inside_stages(sizes, [list(range(sizes.tp_size))])


def pp_groups(sizes: GroupSizes) -> Groups:
    """Strided by `tp_size`, one per tensor rank: `[0,8] [1,9] ... [7,15]`."""
    return [[start + tp_rank for start in sizes.stage_starts()] for tp_rank in range(sizes.tp_size)]


def self_pp_groups(sizes: GroupSizes) -> Groups:
    """One rank wide, what a draft's pipeline scope installs: `[0] [1] ... [15]`."""
    return [[sizes.offset + rank] for rank in range(sizes.ranks)]


def attn_tp_groups(sizes: GroupSizes) -> Groups:
    """The fastest attention digit, width 8/2/2 = 2; stage 0: `[0,1] [2,3] [4,5] [6,7]`."""
    one_stage = _digit_groups(sizes.attn_dp_size * sizes.attn_cp_size, sizes.attn_tp_size, 1)
    return _inside_stages(sizes, one_stage)


def attn_cp_groups(sizes: GroupSizes) -> Groups:
    """Same replica, same `attn_tp_rank`; stage 0: `[0,2] [1,3] [4,6] [5,7]`."""
    one_stage = _digit_groups(sizes.attn_dp_size, sizes.attn_cp_size, sizes.attn_tp_size)
    return _inside_stages(sizes, one_stage)


def attn_dp_replicas(sizes: GroupSizes) -> Groups:
    """Who holds the same requests; an index, not a collective group. Stage 0: `[0,1,2,3] [4,5,6,7]`."""
    one_stage = _digit_groups(sizes.attn_dp_size, sizes.attn_cp_size * sizes.attn_tp_size, 1)
    return _inside_stages(sizes, one_stage)


def moe_dp_groups(sizes: GroupSizes) -> Groups:
    """The slowest expert digit: blocks of `tp_size / moe_dp_size` exchange position-wise.

    Stage 0: `[0,4] [1,5] [2,6] [3,7]`.
    """
    one_stage = _digit_groups(1, sizes.moe_dp_size, sizes.moe_ep_size * sizes.moe_tp_size)
    return _inside_stages(sizes, one_stage)


def moe_ep_groups(sizes: GroupSizes) -> Groups:
    """Inside a MoE-DP block, strided by `moe_tp_size`.

    Stage 0: `[0,1,2,3] [4,5,6,7]`; with tp 4, ep 2 (MoE-TP 2): `[0,2] [1,3]`.
    """
    one_stage = _digit_groups(sizes.moe_dp_size, sizes.moe_ep_size, sizes.moe_tp_size)
    return _inside_stages(sizes, one_stage)


def moe_tp_groups(sizes: GroupSizes) -> Groups:
    """The fastest expert digit, width 8/4/2 = 1.

    Stage 0: `[0] [1] ... [7]`; with tp 4, ep 2 (MoE-TP 2): `[0,1] [2,3]`.
    """
    one_stage = _digit_groups(sizes.moe_dp_size * sizes.moe_ep_size, sizes.moe_tp_size, 1)
    return _inside_stages(sizes, one_stage)


def dcp_groups(sizes: GroupSizes) -> Groups:
    """Contiguous blocks of `dcp_size` inside the attention-TP group.

    With `dcp_size=2` stage 0 is `[0,1] [2,3] [4,5] [6,7]`; with 1 every rank stands alone.
    """
    one_stage = _digit_groups(sizes.tp_size // sizes.dcp_size, sizes.dcp_size, 1)
    return _inside_stages(sizes, one_stage)


#: Order of the build (TP first) and the name of each group.
_CUTS: dict[str, Callable[[GroupSizes], Groups]] = {
    "tp": tp_groups,
    "dcp": dcp_groups,
    "attn_cp": attn_cp_groups,
    "attn_tp": attn_tp_groups,
    "moe_dp": moe_dp_groups,
    "moe_ep": moe_ep_groups,
    "moe_tp": moe_tp_groups,
    "pp": pp_groups,
    "self_pp": self_pp_groups,
}


def layout(sizes: GroupSizes) -> dict[str, Groups]:
    """Every collective group by name, in the order in which the groups are built."""
    return {name: cut(sizes) for name, cut in _CUTS.items()}

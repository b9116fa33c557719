"""Owns the arithmetic of widths and ranks: what follows from the configured leaves and one world rank.

Called by publish, and by code that asks about other ranks than its own; the names are declared in
`arg_groups/fields/parallel.py` and `parallel_names.py`. Pure functions: must not read the context, a process
group or the platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups.fields.parallel import attn_dp_size_of, num_worlds_of
from sglang.srt.runtime_context.identities import as_integer

__all__ = [
    "AttentionRanks",
    "ExpertRanks",
    "WIDTH_LEAVES",
    "deployment_counts",
    "derive_attention_ranks",
    "derive_attention_widths",
    "derive_expert_ranks",
    "derive_parallel_widths",
    "derive_stage_ranks",
    "leads_attn_tp",
    "published_widths",
    "ranks_of_node",
    "requests_per_replica",
    "runs_attention_dp",
]

#: Leaves that are widths: none may be below one.
WIDTH_LEAVES = (
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "moe_dp_size",
    "attn_cp_size",
    "dcp_size",
    "nnodes",
)


def runs_attention_dp(placement: Mapping[str, Any]) -> bool:
    """Whether a placement has several attention replicas; False where it does not say."""
    return (placement.get("attn_dp_size") or 1) > 1


def derive_attention_widths(*, tp_size: int, attn_cp_size: int, attn_dp_size: int) -> dict[str, int]:
    """`attn_tp_size` and `attn_dp_size`, rounded down: the identities refuse what does not divide."""
    return {"attn_tp_size": tp_size // attn_dp_size // attn_cp_size, "attn_dp_size": attn_dp_size}


def derive_parallel_widths(
    *,
    tp_size: int,
    attn_cp_size: int,
    attn_dp_size: int,
    moe_ep_size: int,
    moe_dp_size: int,
    dcp_size: int,
    dcp_enabled: bool,
) -> dict[str, int]:
    """The six derived widths: `tp 8, attn_dp 2, attn_cp 2, ep 4, moe_dp 2` gives attn_tp 2, moe_tp 1."""
    attention = derive_attention_widths(tp_size=tp_size, attn_cp_size=attn_cp_size, attn_dp_size=attn_dp_size)
    return {
        **attention,
        "moe_ep_size": moe_ep_size,
        "moe_tp_size": tp_size // moe_ep_size // moe_dp_size,
        "dcp_enabled": dcp_enabled,
        "attn_dcp_size": dcp_size if dcp_enabled else 1,
    }


def deployment_counts(
    *, tp_size: int, pp_size: int, dp_size: int, enable_dp_attention: bool, nnodes: int
) -> dict[str, int]:
    """Worlds of ranks, replicas that requests are spread over, ranks of all worlds on one machine.

    `tp 4, dp 2` are two worlds and 8 ranks; with attention data parallelism one world of 4. Two replicas
    either way.
    """
    worlds = num_worlds_of(enable_dp_attention, dp_size)
    return {
        "num_worlds": worlds,
        "num_replicas": dp_size,
        "ranks_on_host": -(-worlds * pp_size * tp_size // nnodes),
    }


def published_widths(leaves: Mapping[str, object]) -> dict[str, int]:
    """The derived widths and counts of published leaves, without those that need a leaf which is missing.

    Raises ValueError when a width is below one: it would divide by zero or describe no layout.
    """
    low = [f"{name} >= 1: got {leaves[name]}" for name in WIDTH_LEAVES if _below_one(leaves.get(name))]
    if low:
        raise ValueError("set by publish: a parallel width must be at least 1\n  - " + "\n  - ".join(low))
    given, widths = SimpleNamespace(**leaves), dict[str, int]()
    with suppress(AttributeError):
        widths |= deployment_counts(
            tp_size=given.tp_size,
            pp_size=given.pp_size,
            dp_size=given.dp_size,
            enable_dp_attention=given.enable_dp_attention,
            nnodes=given.nnodes,
        )
    with suppress(AttributeError):
        widths |= derive_parallel_widths(
            tp_size=given.tp_size,
            attn_cp_size=given.attn_cp_size,
            attn_dp_size=attn_dp_size_of(given.enable_dp_attention, given.dp_size),
            moe_ep_size=given.ep_size,
            moe_dp_size=given.moe_dp_size,
            dcp_size=given.dcp_size,
            dcp_enabled=given.dcp_size > 1,
        )
    return widths


def _below_one(value: object) -> bool:
    number = as_integer(value)
    return number is not None and number < 1


@dataclass(frozen=True)
class AttentionRanks:
    """Replica, context slice, tensor slice and cache stripe of a tensor rank in attention."""

    attn_dp_rank: int
    attn_cp_rank: int
    attn_tp_rank: int
    dcp_rank: int


@dataclass(frozen=True)
class ExpertRanks:
    """Position of a tensor rank among the experts."""

    moe_dp_rank: int
    moe_ep_rank: int
    moe_tp_rank: int


def leads_attn_tp(attn_tp_rank: int) -> bool:
    """Whether that rank of an attention-TP group is its leader."""
    return attn_tp_rank == 0


def derive_attention_ranks(
    *, tp_rank: int, attn_tp_size: int, attn_cp_size: int, dcp_size: int = 1
) -> AttentionRanks:
    """Digits of `tp_rank = (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank`.

    `tp_rank 5, attn_tp 2, attn_cp 2`: replica 1, context slice 0, tensor slice 1. Cache stripes are counted
    inside the attention-TP group.
    """
    slow, attn_tp_rank = divmod(tp_rank, attn_tp_size)
    attn_dp_rank, attn_cp_rank = divmod(slow, attn_cp_size)
    return AttentionRanks(attn_dp_rank, attn_cp_rank, attn_tp_rank, attn_tp_rank % dcp_size)


def derive_expert_ranks(*, tp_rank: int, moe_ep_size: int, moe_tp_size: int) -> ExpertRanks:
    """Digits of `tp_rank = (moe_dp_rank * moe_ep_size + moe_ep_rank) * moe_tp_size + moe_tp_rank`.

    `tp_rank 3, ep 2, moe_tp 2`: expert slice 1, tensor slice 1 (so MoE-TP groups are [0,1] [2,3]).
    """
    slow, moe_tp_rank = divmod(tp_rank, moe_tp_size)
    moe_dp_rank, moe_ep_rank = divmod(slow, moe_ep_size)
    return ExpertRanks(moe_dp_rank, moe_ep_rank, moe_tp_rank)


def derive_stage_ranks(*, world_rank: int, tp_size: int, pp_size: int, offset: int = 0) -> tuple[int, int]:
    """`(pp_rank, tp_rank)` of `world_rank = offset + tp_size * pp_rank + tp_rank`.

    World rank 5 of `tp 4, pp 2` is (1, 1).
    """
    rank = world_rank - offset
    if not 0 <= rank < tp_size * pp_size:
        raise ValueError(
            f"set by publish: world_rank {world_rank} is outside the deployment: "
            f"0 <= world_rank - ep_join_rank_offset < tp_size * pp_size does not hold for "
            f"{world_rank} - {offset} and {tp_size} * {pp_size}"
        )
    return divmod(rank, tp_size)


def requests_per_replica(max_running_requests: int, attn_dp_size: int) -> int:
    """The flag counts the requests of a whole tensor group: each attention replica runs its share."""
    return max(1, max_running_requests // attn_dp_size)


def ranks_of_node(world_size: int, nodes: int, node: int) -> range:
    """World ranks of one machine: a contiguous block, so that neighbours of a tensor group share it."""
    width = world_size // nodes
    return range(node * width, (node + 1) * width)

"""Owns `Publication`: everything that one publish puts in force, checked before it replaces anything.

Read by the context, which installs it, and by scopes of tests, which put the previous one back. Must not
touch the process-wide context: a refused publication changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.arg_groups.overrides import max_speculative_num_draft_tokens_of
from sglang.srt.runtime_context.bags import PARALLEL, Bag, build_bags, project
from sglang.srt.runtime_context.identities import as_integer, groups_in_the_way, validate_parallel
from sglang.srt.runtime_context.parallel import ParallelContext
from sglang.srt.runtime_context.widths import (
    derive_attention_ranks,
    derive_expert_ranks,
    derive_stage_ranks,
    runs_attention_dp,
)

__all__ = ["OverrideEntry", "Publication", "SpawnRanks", "build_publication"]


@dataclass(frozen=True)
class SpawnRanks:
    """What differs between the processes of one record, stated by the process that spawned this one.

    `world_rank` fixes the rank in every group. No group knows `dp_rank`, the number of this world (None: the
    only one), and `gpu_id`, the device (None: a CPU rank).
    """

    world_rank: int = 0
    dp_rank: int | None = None
    gpu_id: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("world_rank", self.world_rank),
            ("dp_rank", self.dp_rank),
            ("gpu_id", self.gpu_id),
        ):
            if value is None and name != "world_rank":
                continue
            rank = as_integer(value)
            if rank is None or rank < 0:
                raise ValueError(f"SpawnRanks({name}={value!r}): a rank is an integer from 0 up")
            object.__setattr__(self, name, rank)


@dataclass(frozen=True)
class OverrideEntry:
    """One entry of the log: who replaced which published leaf, the value before and after."""

    source: str
    namespace: str
    name: str
    before: object
    after: object


@dataclass
class Publication:
    """One record in force. The parallel context takes `stamp` over and adds to it."""

    record: Any
    role: str | None
    bags: dict[str, Bag]
    config: dict[str, Any]
    stamp: dict[str, Any]
    draft_bound: int | None
    log: list[OverrideEntry] = field(default_factory=list)
    #: Flags seeded at publish: (group, leaf) -> value.
    seeds: dict[tuple[str, str], object] = field(default_factory=dict)


def build_publication(record: object, *, role: str | None, ranks: SpawnRanks | None) -> Publication:
    """Read the record, derive widths and ranks, and check them.

    `ValueError` for a layout that contradicts itself, `RuntimeError` while groups of other widths or of
    another rank exist.
    """
    values = project(record)
    config = values[PARALLEL]
    stamp = {} if ranks is None else _placement(config, ranks)
    candidate = ParallelContext()
    candidate.put(config, stamp)
    # Groups first: otherwise a rank that is read from an old group would be blamed on the record.
    standing = groups_in_the_way(candidate)
    if standing:
        rules = "\n".join(f"  - {line}" for line in standing)
        raise RuntimeError(
            "publish while process groups of other widths or of another rank stand; "
            f"call destroy_model_parallel() first\n{rules}"
        )
    validate_parallel(candidate, "publish", groups=())
    return Publication(
        record=record,
        role=role,
        bags=build_bags(values),
        config=config,
        stamp=stamp,
        draft_bound=_draft_bound(record),
        seeds={
            ("capture", "enable_torch_compile"): bool(
                values["exec.graph"].get("enable_torch_compile", False)
            ),
            ("dp", "enabled"): runs_attention_dp(config),
        },
    )


def _placement(config: dict[str, Any], ranks: SpawnRanks) -> dict[str, Any]:
    """Every rank that follows from the world rank; fewer of them where the record lacks widths."""
    stamp: dict[str, Any] = {
        "launch_world_rank": ranks.world_rank,
        "dp_rank": ranks.dp_rank,
        "gpu_id": ranks.gpu_id,
    }
    if "tp_size" not in config or "pp_size" not in config:
        return stamp
    pp_rank, tp_rank = derive_stage_ranks(
        world_rank=ranks.world_rank,
        tp_size=config["tp_size"],
        pp_size=config["pp_size"],
        offset=config.get("ep_join_rank_offset", 0),
    )
    stamp.update(pp_rank=pp_rank, tp_rank=tp_rank)
    # A width of zero comes from a division with a remainder, which the identities are about to refuse.
    if config.get("attn_tp_size"):
        attention = derive_attention_ranks(
            tp_rank=tp_rank,
            attn_tp_size=config["attn_tp_size"],
            attn_cp_size=config["attn_cp_size"],
            dcp_size=config["dcp_size"],
        )
        stamp.update(vars(attention))
    if config.get("moe_tp_size"):
        experts = derive_expert_ranks(
            tp_rank=tp_rank, moe_ep_size=config["moe_ep_size"], moe_tp_size=config["moe_tp_size"]
        )
        stamp.update(vars(experts))
    return stamp


def _draft_bound(record: object) -> int | None:
    """Most tokens a verify round may hold, fixed for this publication; the adaptive file is read now."""
    try:
        return max_speculative_num_draft_tokens_of(record)
    except AttributeError:  # a partial record that says nothing of drafts
        return None

"""Owns the plan of a deployment: every rank's seat and every group, from flags alone, before anything starts.

Read by `sglang.placement`, which shows it as a table, as JSON or as a picture. It must not compute ranks by
rules of its own: seats come from the publication of each rank, groups from `group_layout`, machines from
`ranks_of_node`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.fields.parallel import num_worlds_of
from sglang.srt.arg_groups.hooks.pipeline import resolve_layout
from sglang.srt.arg_groups.parsing.cli import parse_command_line
from sglang.srt.distributed.group_layout import GroupSizes, attn_dp_replicas, layout
from sglang.srt.runtime_context.publication import Publication, SpawnRanks, build_publication
from sglang.srt.runtime_context.widths import leads_attn_tp, ranks_of_node
from sglang.srt.server_args import ServerArgs

#: In the order in which a reader wants them; each has `<name>_size` and `<name>_rank` in the context.
DIMENSIONS = ("pp", "tp", "attn_dp", "attn_cp", "attn_tp", "dcp", "moe_dp", "moe_ep", "moe_tp")

MEANING = {
    "pp": "pipeline stages; the group passes hidden states on",
    "tp": "one stage's weights, cut over these ranks",
    "attn_dp": "ranks that hold the same requests; an index, not a group",
    "attn_cp": "slices of one long prompt",
    "attn_tp": "attention heads, cut over ranks that hold the same requests",
    "dcp": "stripes of one sequence's cache while decoding",
    "moe_dp": "copies of the experts",
    "moe_ep": "whole experts, spread over ranks",
    "moe_tp": "each expert's matrices, cut over ranks",
}

#: Settings by which a layout is spelled on the command line; `dp_size` has two spellings.
_FLAGS = ("tp_size", "pp_size", "attn_cp_size", "dcp_size", "ep_size", "moe_dp_size", "nnodes")

#: A longer table is of no use, and every seat costs as much as one publication.
MOST_RANKS = 8192


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank sits: `ranks` holds its `<dimension>_rank` of every dimension, `dp_rank` its replica."""

    dp_rank: int
    node: int
    world_rank: int
    ranks: Mapping[str, int]

    @property
    def is_attn_tp_leader(self) -> bool:
        """The first rank of an attention-TP group takes its requests and samples for all of it."""
        return leads_attn_tp(self.ranks["attn_tp"])


@dataclass(frozen=True, kw_only=True)
class Group:
    """One kind of group and its lists of world ranks; one that is not `collective` is only an index."""

    kind: str
    width: int
    lists: Sequence[Sequence[int]]
    collective: bool = True


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One way to cut the ranks into groups, with every kind of group that cuts them so."""

    kinds: Sequence[str]
    width: int
    lists: Sequence[Sequence[int]]
    collective: bool = True

    @property
    def label(self) -> str:
        """`tp = attn_tp = moe_tp`."""
        return " = ".join(self.kinds)


def partitions(groups: Sequence[Group]) -> list[Partition]:
    """The different ways in which the ranks are cut, each with all kinds that cut them so.

    Kinds with the same lists of ranks in the same order become one, at the place of the first of them. Kinds
    with one rank a group are left out, and an index is never merged with a collective group.
    """
    equal: dict[tuple[bool, tuple[tuple[int, ...], ...]], list[Group]] = {}
    for group in groups:
        if group.width > 1:
            lists = tuple(tuple(ranks) for ranks in group.lists)
            equal.setdefault((group.collective, lists), []).append(group)
    return [
        Partition(
            kinds=[group.kind for group in same],
            width=same[0].width,
            lists=same[0].lists,
            collective=collective,
        )
        for (collective, _), same in equal.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deployment: `num_worlds` worlds that are all cut alike, over `nodes` machines."""

    flags: str
    num_worlds: int
    nodes: int
    world_size: int
    widths: Mapping[str, int]
    seats: Sequence[Seat]
    groups: Sequence[Group]

    def wide(self) -> list[str]:
        """Dimensions with more than one rank."""
        return [name for name in DIMENSIONS if self.widths[name] > 1]

    def flat(self) -> list[str]:
        """Dimensions with one rank: every rank is rank 0 of a group of its own."""
        return [name for name in DIMENSIONS if self.widths[name] == 1]


def plan_from_flags(argv: Sequence[str], *, prog: str) -> Plan:
    """The plan that a server's command line describes; the model may be left out, it places no rank.

    `ValueError` names the rule and the numbers of an impossible layout; an unknown flag exits with code 2.
    """
    fields = parse_command_line(argv, prog=prog, complete=False)
    return plan_of(ServerArgs(**{"model_path": "", **fields}))


def plan_of(record: ServerArgs) -> Plan:
    """The plan of a record that is not resolved yet."""
    resolve_layout(record)
    first = build_publication(record, role=None, ranks=_world_rank(record.ep_join_rank_offset))
    config = first.config
    sizes = _group_sizes(config)
    worlds = num_worlds_of(config["enable_dp_attention"], config["dp_size"])
    total = worlds * sizes.ranks
    if total > MOST_RANKS:
        raise ValueError(f"{total} ranks are more than this tool shows: {MOST_RANKS} at most")
    world = [
        build_publication(record, role=None, ranks=_world_rank(sizes.offset + index))
        for index in range(sizes.ranks)
    ]
    nodes = [
        node for node in range(config["nnodes"]) for _ in ranks_of_node(sizes.ranks, config["nnodes"], node)
    ]
    return Plan(
        flags=_spelled(config),
        num_worlds=worlds,
        nodes=config["nnodes"],
        world_size=sizes.ranks,
        widths={name: config[f"{name}_size"] for name in DIMENSIONS},
        seats=[
            _seat(publication, replica, node)
            for replica in range(worlds)
            for node, publication in zip(nodes, world)
        ],
        groups=_groups(sizes),
    )


def _world_rank(rank: int) -> SpawnRanks:
    return SpawnRanks(world_rank=rank)


def _group_sizes(config: Mapping[str, Any]) -> GroupSizes:
    """What the group build reads off the published context."""
    return GroupSizes(
        **{f"{name}_size": config[f"{name}_size"] for name in DIMENSIONS},
        offset=config["ep_join_rank_offset"],
    )


def _seat(publication: Publication, replica: int, node: int) -> Seat:
    stamp = publication.stamp
    return Seat(
        dp_rank=replica,
        node=node,
        world_rank=stamp["launch_world_rank"],
        ranks={name: stamp[f"{name}_rank"] for name in DIMENSIONS},
    )


def _groups(sizes: GroupSizes) -> list[Group]:
    built = layout(sizes)
    # Stage by stage there; here one entry a replica, over all stages.
    replicas: list[list[int]] = [[] for _ in range(sizes.attn_dp_size)]
    for index, ranks in enumerate(attn_dp_replicas(sizes)):
        replicas[index % sizes.attn_dp_size].extend(ranks)
    groups = []
    for kind in (*DIMENSIONS, "self_pp"):
        if kind == "attn_dp":
            groups.append(Group(kind=kind, width=sizes.attn_dp_size, lists=replicas, collective=False))
        else:
            groups.append(Group(kind=kind, width=len(built[kind][0]), lists=built[kind]))
    return groups


def _spelled(config: Mapping[str, Any]) -> str:
    """The shortest command line that states this layout."""
    values = [(name, config[name]) for name in _FLAGS]
    values.insert(2, ("attn_dp_size" if config["enable_dp_attention"] else "dp_size", config["dp_size"]))
    words = [f"--{name.replace('_', '-')} {value}" for name, value in values if value > 1]
    if config["ep_join_rank_offset"]:
        words.append(f"--ep-join-rank-offset {config['ep_join_rank_offset']}")
    return " ".join(words) or "--tp-size 1"

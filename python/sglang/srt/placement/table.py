"""Owns the two texts of a plan: tables for a reader, JSON for a program.

Read by `sglang.placement`. It must not use colours or the width of a terminal: a pipe and a screen get the
same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from sglang.srt.placement.plan import Plan, Seat, partitions

_COLUMNS = 80
#: How attention and how the experts write a tensor rank, slowest digit first.
_SYSTEMS = (("attn_dp", "attn_cp", "attn_tp"), ("moe_dp", "moe_ep", "moe_tp"))
#: Consecutive ranks from this many on are written `[0..7]`.
_RUN = 5


def headline(plan: Plan) -> list[str]:
    """How many ranks there are, and how attention and the experts cut a stage."""
    widths = plan.widths
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    first = f"{ranks}: pp {widths['pp']} x tp {widths['tp']}"
    if plan.num_worlds > 1:
        first = f"{plan.num_worlds} replicas of {first}, each a world of its own"
    if plan.nodes > 1:
        first += f"; over {plan.nodes} machines"
    systems = [" x ".join(f"{name} {widths[name]}" for name in system) for system in _SYSTEMS]
    return [first, f"tp {widths['tp']} = {' = '.join(systems)}"]


def shown_ranks(ranks: Sequence[int]) -> str:
    """A list of world ranks, written short: `[0,4]`, `[0..7]`, `[0..7,16..23]`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = (f"{run[0]}..{run[-1]}" if len(run) >= _RUN else ",".join(map(str, run)) for run in runs)
    return f"[{','.join(shown)}]"


def as_text(plan: Plan) -> str:
    """Seats and groups as tables, in 80 columns where that is possible."""
    lines = [*headline(plan), "", *_seat_lines(plan), "", *_group_lines(plan)]
    return "\n".join(lines) + "\n"


def _seat_columns(plan: Plan) -> list[tuple[str, Callable[[Seat], int]]]:
    columns: list[tuple[str, Callable[[Seat], int]]] = [("rank", lambda seat: seat.world_rank)]
    if plan.nodes > 1:
        columns.append(("node", lambda seat: seat.node))
    if plan.num_worlds > 1:
        columns.append(("dp_rank", lambda seat: seat.dp_rank))
    return columns + [(name, _rank_in(name)) for name in plan.wide()]


def _rank_in(name: str) -> Callable[[Seat], int]:
    return lambda seat: seat.ranks[name]


def _seat_lines(plan: Plan) -> Iterator[str]:
    columns = _seat_columns(plan)
    cells = [[str(read(seat)) for _, read in columns] for seat in plan.seats]
    widths = [max(len(title), *(len(row[at]) for row in cells)) for at, (title, _) in enumerate(columns)]
    gap = "  " if sum(widths) + 2 * len(widths) + 2 <= _COLUMNS else " "
    yield "seats (* leads its attention-TP group)"
    yield "  " + gap.join(title.rjust(width) for (title, _), width in zip(columns, widths))
    for seat, row in zip(plan.seats, cells):
        mark = "* " if seat.is_attn_tp_leader else "  "
        yield mark + gap.join(text.rjust(width) for text, width in zip(row, widths))
    if plan.flat():
        yield from _wrapped("one wide, so every rank is rank 0 there: ", plan.flat(), ", ")


def _group_lines(plan: Plan) -> Iterator[str]:
    wide = partitions(plan.groups)
    same = ", the same in each replica" if plan.num_worlds > 1 else ""
    if not wide:
        yield "groups: every rank is alone in each of its groups"
        return
    yield f"groups (world ranks{same})"
    longest = max(len(partition.label) for partition in wide)
    yield f"  {'kind'.ljust(longest)}  width  ranks"
    for partition in wide:
        head = f"  {partition.label.ljust(longest)}  {partition.width:>5}  "
        texts = [shown_ranks(ranks) for ranks in partition.lists]
        if not partition.collective:
            texts = [f"{index}={text}" for index, text in enumerate(texts)]
        yield from _wrapped(head, texts, " ")
    if any(not partition.collective for partition in wide):
        yield "  (attn_dp is an index and no group: N=[ranks that hold replica N's requests])"
    alone = [group.kind for group in plan.groups if group.width == 1]
    if alone:
        yield from _wrapped("one rank a group: ", alone, ", ")


def _wrapped(head: str, words: Sequence[str], between: str) -> Iterator[str]:
    """Words after a head, wrapped at 80 columns under the first of them; a long word breaks at commas."""
    line, room = head, _COLUMNS - len(head)
    for at, word in enumerate(words):
        text = word + (between if at + 1 < len(words) else "")
        pieces = re.findall("[^,]*,?", text) if len(text.rstrip()) > room else [text]
        for piece in pieces:
            if len(line) > len(head) and len(line) + len(piece.rstrip()) > _COLUMNS:
                yield line.rstrip()
                line = " " * len(head)
            line += piece
    yield line.rstrip()


def as_json(plan: Plan) -> dict[str, object]:
    """The same plan with the names that the context and `GET /placement` use."""
    return {
        "flags": plan.flags,
        "replicas": plan.num_worlds,
        "nnodes": plan.nodes,
        "world_size": plan.world_size,
        "widths": {f"{name}_size": width for name, width in plan.widths.items()},
        "ranks": [_seat_json(plan, seat) for seat in plan.seats],
        "groups": [
            {
                "kind": group.kind,
                "width": group.width,
                "collective": group.collective,
                "ranks": [list(ranks) for ranks in group.lists],
            }
            for group in plan.groups
        ],
    }


def _seat_json(plan: Plan, seat: Seat) -> dict[str, object]:
    # Without a controller over replicas nobody states a dp_rank, and the context has None.
    return {
        "world_rank": seat.world_rank,
        "node": seat.node,
        "dp_rank": seat.dp_rank if plan.num_worlds > 1 else None,
        **{f"{name}_rank": rank for name, rank in seat.ranks.items()},
        "leader": seat.is_attn_tp_leader,
    }

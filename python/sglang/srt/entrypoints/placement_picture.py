"""Owns the picture of a plan: a cell for each rank with its seat, and for each kind of group the same grid in
the colours of its groups.

Read by ``sglang.placement``. Every colour is repeated by a printed number, so that the picture also serves
whoever does not tell the colours apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from sglang.srt.entrypoints.placement_plan import MEANING, Group, Plan, Seat
from sglang.srt.entrypoints.placement_table import headline
from sglang.srt.entrypoints.svg_canvas import Canvas, ink_on, text_width, tint, wrap

__all__ = ["MOST_DRAWN", "draw"]

#: Colours that stay apart under the common kinds of colour blindness (after Okabe and Ito).
_COLOURS = {
    "pp": "#d55e00",
    "tp": "#0072b2",
    "attn_dp": "#009e73",
    "attn_cp": "#e69f00",
    "attn_tp": "#56b4e9",
    "dcp": "#555555",
    "moe_dp": "#cc79a7",
    "moe_ep": "#882255",
    "moe_tp": "#b5a800",
}
#: Strength of the colour of ranks (and groups) 0, 1, 2, 3, then again: neighbours differ well.
_STRENGTHS = (0.2, 0.75, 0.42, 1.0)

#: A larger picture has no page to be shown on.
MOST_DRAWN = 256

_MARGIN = 24.0
_MOST_ACROSS = 8
_LEAST_WIDTH = 720.0
_LABEL, _CELL, _GAP = 76.0, 126.0, 8.0
_HEAD, _CHIP = 30.0, 22.0
_SMALL, _SMALL_HEIGHT, _SMALL_GAP = 66.0, 42.0, 4.0
_PANEL_HEAD, _PANEL_GAP = 42.0, 28.0

_Row = tuple[str, list[Seat]]


def draw(plan: Plan) -> str:
    """The picture as one SVG document; ValueError where it would have too many cells."""
    if len(plan.seats) > MOST_DRAWN:
        raise ValueError(
            f"{len(plan.seats)} ranks do not fit into a picture ({MOST_DRAWN} at most); leave --svg out"
        )
    canvas = Canvas()
    across = _across(plan.widths["tp"])
    grid = _left(plan) + _line(across, _CELL, _GAP) + _MARGIN
    two_panels = 2 * _MARGIN + 2 * _line(across, _SMALL, _SMALL_GAP) + _PANEL_GAP
    width = max(grid, two_panels, _LEAST_WIDTH)
    y = _title(canvas, plan, width)
    for replica in range(plan.replicas):
        seats = [seat for seat in plan.seats if seat.dp_rank == replica]
        for node, members in groupby(seats, key=lambda seat: seat.node):
            y = _block(canvas, plan, list(members), replica, node, y)
    y = _panels(canvas, plan, y, width)
    y = _legend(canvas, plan, y, width)
    return canvas.page(width, y + _MARGIN, headline(plan)[0])


def _left(plan: Plan) -> float:
    """Where cells begin: stages have their names before them, where there is more than one."""
    return _MARGIN + (_LABEL if plan.widths["pp"] > 1 else 0.0)


def _line(count: int, cell: float, gap: float) -> float:
    """Width of so many cells side by side."""
    return count * (cell + gap) - gap


def _across(count: int) -> int:
    """Cells in a line: at most eight, and lines of about one length."""
    lines = -(-count // _MOST_ACROSS)
    return -(-count // lines)


def _title(canvas: Canvas, plan: Plan, width: float) -> float:
    first, second = headline(plan)
    y = _MARGIN
    for line in wrap(first, 20, width - 2 * _MARGIN, bold=True):
        y += 24
        canvas.words(_MARGIN, y - 6, line, size=20, bold=True)
    for text in (second, plan.flags):
        for line in wrap(text, 14, width - 2 * _MARGIN):
            y += 20
            canvas.words(_MARGIN, y - 5, line, size=14, ink="#333")
    return y + 14


def _rows(seats: Sequence[Seat]) -> Iterator[_Row]:
    """Stage by stage, a long stage in several lines."""
    for stage, members in groupby(seats, key=lambda seat: seat.ranks["pp"]):
        row = list(members)
        across = _across(len(row))
        for start in range(0, len(row), across):
            yield (f"stage {stage}" if start == 0 else ""), row[start : start + across]


def _block(canvas: Canvas, plan: Plan, seats: list[Seat], replica: int, node: int, y: float) -> float:
    """The ranks of one replica on one machine."""
    words = [f"replica {replica}"] if plan.replicas > 1 else []
    words += [f"node {node}"] if plan.nodes > 1 else []
    left = _left(plan)
    cell_height = _HEAD + _CHIP * max(len(plan.wide()), 1) + 4
    rows = list(_rows(seats))
    if words:
        height = 26 + len(rows) * (cell_height + _GAP)
        length = left - _MARGIN + _line(max(len(row) for _, row in rows), _CELL, _GAP) + 20
        canvas.box(_MARGIN - 10, y, length, height, fill="#f4f4f4", edge="#999")
        canvas.words(_MARGIN, y + 19, ", ".join(words), size=15, bold=True)
        y += 26
    for label, row in rows:
        if plan.widths["pp"] > 1 and label:
            canvas.words(_MARGIN, y + cell_height / 2 + 5, label, size=14, ink="#333")
        for column, seat in enumerate(row):
            _cell(canvas, plan, seat, left + column * (_CELL + _GAP), y, cell_height)
        y += cell_height + _GAP
    return y + (10 if words else 0)


def _cell(canvas: Canvas, plan: Plan, seat: Seat, x: float, y: float, height: float) -> None:
    canvas.box(x, y, _CELL, height, fill="#fff", edge="#333", name="rank")
    canvas.words(x + 10, y + 21, f"rank {seat.world_rank}", size=16, bold=True)
    if seat.leads:
        canvas.star(x + _CELL - 15, y + 15, 8)
    if not plan.wide():
        canvas.words(x + 10, y + _HEAD + 15, "alone", size=13, ink="#333")
    for at, name in enumerate(plan.wide()):
        rank = seat.ranks[name]
        fill = _fill(name, rank)
        top = y + _HEAD + at * _CHIP
        canvas.box(x + 6, top, _CELL - 12, _CHIP - 3, fill=fill)
        canvas.words(x + 11, top + 14, name, size=13, ink=ink_on(fill))
        canvas.words(x + _CELL - 11, top + 14, str(rank), size=13, ink=ink_on(fill), bold=True, anchor="end")


def _fill(name: str, index: int) -> str:
    return tint(_COLOURS[name], _STRENGTHS[index % len(_STRENGTHS)])


def _panels(canvas: Canvas, plan: Plan, y: float, width: float) -> float:
    """One small grid for each kind of group that has more than one member."""
    groups = [group for group in plan.groups if group.width > 1]
    if not groups:
        return y
    same = ", the same in each replica" if plan.replicas > 1 else ""
    canvas.words(_MARGIN, y + 22, f"Groups{same}: equal numbers belong together", size=16, bold=True)
    y += 40
    rows = list(_rows([seat for seat in plan.seats if seat.dp_rank == 0]))
    across = max(len(row) for _, row in rows)
    panel_width = max(_line(across, _SMALL, _SMALL_GAP), 176.0)
    panel_height = _PANEL_HEAD + len(rows) * (_SMALL_HEIGHT + _SMALL_GAP) + 18
    a_line = max(1, int((width - 2 * _MARGIN + _PANEL_GAP) // (panel_width + _PANEL_GAP)))
    for at, group in enumerate(groups):
        left = _MARGIN + (at % a_line) * (panel_width + _PANEL_GAP)
        _panel(canvas, group, rows, left, y + (at // a_line) * panel_height)
    return y + -(-len(groups) // a_line) * panel_height


def _panel(canvas: Canvas, group: Group, rows: Sequence[_Row], x: float, y: float) -> None:
    colour = _COLOURS[group.kind]
    canvas.box(x, y, 14, 14, fill=colour)
    canvas.words(x + 20, y + 13, group.kind, size=15, bold=True)
    count = len(group.lists)
    noun = "group" if group.collective else "replica"
    size = group.width if group.collective else len(group.lists[0])
    canvas.words(x, y + 33, f"{count} {noun}{'s' if count > 1 else ''} of {size}", size=13, ink="#333")
    number = {rank: index for index, ranks in enumerate(group.lists) for rank in ranks}
    short = noun if text_width(f"{noun} {count - 1}", 12) <= _SMALL else noun[0]
    for line, (_, row) in enumerate(rows):
        top = y + _PANEL_HEAD + line * (_SMALL_HEIGHT + _SMALL_GAP)
        for column, seat in enumerate(row):
            index = number[seat.world_rank]
            fill = _fill(group.kind, index)
            left = x + column * (_SMALL + _SMALL_GAP)
            canvas.box(left, top, _SMALL, _SMALL_HEIGHT, fill=fill, edge=colour, name=f"member {group.kind}")
            middle, ink = left + _SMALL / 2, ink_on(fill)
            canvas.words(middle, top + 18, str(seat.world_rank), size=15, bold=True, ink=ink, anchor="middle")
            canvas.words(middle, top + 35, f"{short} {index}", size=12, ink=ink, anchor="middle")


def _legend(canvas: Canvas, plan: Plan, y: float, width: float) -> float:
    """What each colour and the star mean, and which dimensions are not drawn because they are one wide."""
    y += 8
    for name in plan.wide():
        canvas.box(_MARGIN, y, 14, 14, fill=_COLOURS[name])
        canvas.words(_MARGIN + 22, y + 12, name, size=13, bold=True)
        for line in wrap(f"{plan.widths[name]} wide: {MEANING[name]}", 13, width - 2 * _MARGIN - 94):
            canvas.words(_MARGIN + 94, y + 12, line, size=13)
            y += 20
    canvas.star(_MARGIN + 7, y + 7, 8)
    canvas.words(_MARGIN + 22, y + 12, "leads its attention-TP group: takes its requests, samples", size=13)
    y += 20
    if plan.flat():
        text = f"one wide, every rank is rank 0 there: {', '.join(plan.flat())}"
        for line in wrap(text, 13, width - 2 * _MARGIN):
            canvas.words(_MARGIN, y + 12, line, size=13)
            y += 20
    return y

"""Owns the picture of a plan: a box per rank, framed by replica, machine and stage, and the list of groups.

Read by `sglang.placement`. A group has one colour and one letter, in the boxes and in the lists; it must not
need colours to be understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from sglang.srt.placement.plan import MEANING, Partition, Plan, Seat, partitions
from sglang.srt.placement.svg_canvas import Canvas, ink_on, text_width, wrap
from sglang.srt.placement.svg_frames import LABEL_HEIGHT, LABEL_SIZE, PADDING, Area
from sglang.srt.placement.table import headline, shown_ranks

#: Twelve light colours that lie far apart, also under the common kinds of colour blindness.
_TINTS = (
    *("#c3f0ff", "#ffb4b4", "#f0f096", "#5aa5f0", "#96d287", "#d2965a"),
    *("#4bd2ff", "#ff96c3", "#96ffe1", "#a5a587", "#ffe1b4", "#c396d2"),
)

#: A larger picture fits no page. Groups of two ranks make 128 groups; two colours tell 144 apart.
MOST_DRAWN = 256

_MARGIN, _COLUMN_GAP = 24.0, 32.0
#: Widths of the drawing and of its list; at 1200 the smallest text is still readable.
_LEAST, _MOST, _PANEL = 620.0, 1200.0, 440.0
_SEAT, _SEAT_HEAD, _INSET = 128.0, 30.0, 6.0
_NAME_HEIGHT, _TRACK, _CHIP_GAP = 17.0, 4.0, 4.0
_SMALL, _LINE = 13.0, 19.0
_GREY = "#444"

_GUIDE = (
    "Ranks with the same letter and colour in one kind are a group. A 1 is place 1 in group A; the mark "
    "below it shows where that is."
)


def colours_of(index: int) -> tuple[str, str | None]:
    """Colour of a group, and of the stripe on it from the thirteenth group on."""
    cycle, at = divmod(index, len(_TINTS))
    return _TINTS[at], _TINTS[(at + cycle) % len(_TINTS)] if cycle else None


def letter_of(index: int) -> str:
    """A, B, ..., Z, AA, AB, ...; numbers are kept for ranks."""
    before, at = divmod(index, 26)
    return (letter_of(before - 1) if before else "") + chr(ord("A") + at)


@dataclass(frozen=True)
class _Membership:
    """The group of one partition in which a rank is, and its place there."""

    partition: Partition
    group: int
    place: int


def draw(plan: Plan) -> str:
    """The picture as one SVG document; ValueError where it would have too many boxes."""
    if len(plan.seats) > MOST_DRAWN:
        raise ValueError(
            f"{len(plan.seats)} ranks do not fit into a picture ({MOST_DRAWN} at most); leave --svg out"
        )
    canvas = Canvas()
    cuts = [partition for partition in partitions(plan.groups) if partition.collective]
    seats = _framed(plan, _seat_height(cuts))
    seats.arrange(_MOST)
    beside = seats.width <= _PANEL
    width = seats.width + _COLUMN_GAP + _PANEL if beside else max(seats.width, _LEAST)
    top = _title(canvas, plan, width)
    members = _memberships(cuts)
    for area, x, y, depth in seats.placed(_MARGIN, top):
        if isinstance(area.content, Seat):
            _seat(canvas, area.content, members.get(area.content.world_rank, []), x, y, area.height)
        elif area.label:
            _frame(canvas, area, depth, x, y)
    bottom = top + seats.height
    if beside:
        below = _groups(canvas, plan, cuts, _MARGIN + seats.width + _COLUMN_GAP, top, _PANEL)
    else:
        below = _groups(canvas, plan, cuts, _MARGIN, bottom + 24, width)
    return canvas.page(width + 2 * _MARGIN, max(bottom, below) + _MARGIN, headline(plan)[0])


def _title(canvas: Canvas, plan: Plan, width: float) -> float:
    first, second = headline(plan)
    y = _MARGIN
    for line in wrap(first, 20, width, bold=True):
        y += 24
        canvas.words(_MARGIN, y - 6, line, size=20, bold=True)
    for text in (second, plan.flags):
        for line in wrap(text, 14, width):
            y += 20
            canvas.words(_MARGIN, y - 5, line, size=14, ink=_GREY)
    return y + 14


def _framed(plan: Plan, height: float) -> Area:
    """All seats, framed by replica, machine and stage where there are several of them."""
    levels: list[tuple[str, Callable[[Seat], int]]] = []
    if plan.num_worlds > 1:
        levels.append(("replica", lambda seat: seat.dp_rank))
    if plan.nodes > 1:
        levels.append(("node", lambda seat: seat.node))
    if plan.widths["pp"] > 1:
        levels.append(("stage", lambda seat: seat.ranks["pp"]))
    if plan.widths["attn_dp"] > 1:
        levels.append(("replica", lambda seat: seat.ranks["attn_dp"]))
    begun: set[tuple[str, int, int, int]] = set()

    def nest(seats: Sequence[Seat], depth: int) -> list[Area]:
        if depth == len(levels):
            return [Area(width=_SEAT, height=height, content=seat) for seat in seats]
        noun, number = levels[depth]
        areas = []
        for index, members in groupby(seats, key=number):
            inside = list(members)
            # A machine may end in the middle of a stage or of a replica.
            key = (noun, inside[0].dp_rank, inside[0].ranks["pp"], index)
            label = f"{noun} {index}, continued" if key in begun else f"{noun} {index}"
            begun.add(key)
            areas.append(Area(label=label, parts=nest(inside, depth + 1)))
        return areas

    return Area(parts=nest(plan.seats, 0))


def _frame(canvas: Canvas, area: Area, depth: int, x: float, y: float) -> None:
    fill, edge = (("#eef0f3", "#555"), ("#fff", "#777"))[depth % 2]
    canvas.box(x, y, area.width, area.height, fill=fill, edge=edge, name=f"frame {area.label}")
    canvas.words(x + PADDING, y + LABEL_HEIGHT - 7, area.label, size=LABEL_SIZE, bold=True)


def _memberships(cuts: Sequence[Partition]) -> dict[int, list[_Membership]]:
    """World rank -> its group in each partition."""
    members: dict[int, list[_Membership]] = {}
    for partition in cuts:
        for group, ranks in enumerate(partition.lists):
            for place, rank in enumerate(ranks):
                members.setdefault(rank, []).append(_Membership(partition, group, place))
    return members


def _chip_height(partition: Partition) -> float:
    return len(partition.kinds) * _NAME_HEIGHT + _TRACK + 8


def _seat_height(cuts: Sequence[Partition]) -> float:
    return _SEAT_HEAD + sum(_chip_height(partition) + _CHIP_GAP for partition in cuts) + 2


def _seat(
    canvas: Canvas, seat: Seat, members: Sequence[_Membership], x: float, y: float, height: float
) -> None:
    canvas.box(x, y, _SEAT, height, fill="#fff", edge="#222", stroke=1.6, name="rank")
    canvas.words(x + 10, y + 21, f"rank {seat.world_rank}", size=17, bold=True)
    if seat.is_attn_tp_leader:
        canvas.star(x + _SEAT - 16, y + 15, 8)
    top = y + _SEAT_HEAD
    for member in members:
        _chip(canvas, member, x + _INSET, top, _SEAT - 2 * _INSET)
        top += _chip_height(member.partition) + _CHIP_GAP


def _chip(canvas: Canvas, member: _Membership, x: float, y: float, width: float) -> None:
    """Names of equal partitions under each other, the letter of the group and the place in it."""
    partition = member.partition
    height = _chip_height(partition)
    fill = _tinted(canvas, member.group, x, y, width, height, name="chip")
    ink = ink_on(fill)
    for line, kind in enumerate(partition.kinds):
        text = f"= {kind}" if line else kind
        canvas.words(x + 8, y + 14 + line * _NAME_HEIGHT, text, size=_SMALL, ink=ink)
    number = str(member.place)
    end = x + width - 6
    canvas.words(end, y + 14, number, size=_SMALL, ink=ink, bold=True, anchor="end")
    left = end - text_width(number, _SMALL, bold=True) - 2
    canvas.words(left, y + 14, letter_of(member.group), size=_SMALL, ink=ink, anchor="end")
    _track(canvas, member, x + 8, y + height - _TRACK - 4, width - 14)


def _track(canvas: Canvas, member: _Membership, x: float, y: float, width: float) -> None:
    """The whole group as a line, with the place of this rank marked on it."""
    canvas.box(x, y, width, _TRACK, fill="#fff", edge="#777", stroke=0.5)
    part = width / member.partition.width
    mark = max(part, 2.0)
    canvas.box(min(x + member.place * part, x + width - mark), y, mark, _TRACK, fill="#222", name="place")


def _tinted(canvas: Canvas, group: int, x: float, y: float, width: float, height: float, *, name: str) -> str:
    """Draw a box in the colours of a group; returns the colour behind its text."""
    fill, stripe = colours_of(group)
    canvas.box(x, y, width, height, fill=fill, edge="#999", name=name)
    if stripe is not None:
        canvas.box(x, y, 5, height, fill=stripe, edge="#999", name="stripe")
    return fill


def _groups(canvas: Canvas, plan: Plan, cuts: Sequence[Partition], x: float, y: float, width: float) -> float:
    """The lists of ranks, what each kind is for, and remarks; in two columns where they fit."""
    own = ", of its own in each replica" if plan.num_worlds > 1 else ""
    title = f"Groups{own}" if cuts else "Every rank is alone in each of its groups"
    canvas.words(x, y + 14, title, size=16, bold=True)
    y += 24
    if cuts:
        y = _paragraph(canvas, _GUIDE, x, y, width) + 8
    columns = 2 if width >= 2 * _PANEL + _COLUMN_GAP else 1
    room = (width - (columns - 1) * _COLUMN_GAP) / columns
    panels = [partial(_panel, canvas, partition) for partition in cuts] + [partial(_remarks, canvas, plan)]
    ends = [y] * columns
    for panel in panels:
        at = ends.index(min(ends))
        ends[at] = panel(x + at * (room + _COLUMN_GAP), ends[at], room) + 16
    return max(ends) - 16


def _panel(canvas: Canvas, partition: Partition, x: float, y: float, room: float) -> float:
    """One partition: its names, what they mean, and each group with its letter."""
    canvas.words(x, y + 13, partition.label, size=_SMALL, bold=True)
    y += _LINE
    count = len(partition.lists)
    size = f"{count} group{'s' if count > 1 else ''} of {partition.width}"
    if len(partition.kinds) == 1:
        y = _paragraph(canvas, f"{size}: {MEANING[partition.kinds[0]]}", x, y, room)
    else:
        for text in (size, *(f"{kind}: {MEANING[kind]}" for kind in partition.kinds)):
            y = _paragraph(canvas, text, x, y, room)
    return _lists(canvas, partition, x, y + 3, room)


def _lists(canvas: Canvas, partition: Partition, x: float, y: float, room: float) -> float:
    """Each group's letter and ranks, in columns of one width."""
    last = letter_of(len(partition.lists) - 1)
    head = text_width(last, _SMALL, bold=True) + 18
    texts = [_in_lines(shown_ranks(ranks), room - head - 6) for ranks in partition.lists]
    step = head + 20 + max(text_width(line, _SMALL) for lines in texts for line in lines)
    across = max(1, int((room + 14) // step))
    for start in range(0, len(texts), across):
        for index in range(start, min(start + across, len(texts))):
            left = x + (index - start) * step
            fill = _tinted(canvas, index, left, y, head, _LINE, name=f"group {partition.kinds[0]}")
            canvas.words(
                left + head / 2 + 1,
                y + 14,
                letter_of(index),
                size=_SMALL,
                ink=ink_on(fill),
                bold=True,
                anchor="middle",
            )
            for at, line in enumerate(texts[index]):
                canvas.words(left + head + 6, y + 14 + at * _LINE, line, size=_SMALL)
        y += max(map(len, texts[start : start + across])) * _LINE + 4
    return y


def _in_lines(ranks: str, room: float) -> list[str]:
    """The list in one line, or broken after commas."""
    return [ranks] if text_width(ranks, _SMALL) <= room else wrap(ranks.replace(",", ", "), _SMALL, room)


def _paragraph(canvas: Canvas, text: str, x: float, y: float, room: float) -> float:
    for line in wrap(text, _SMALL, room):
        canvas.words(x, y + 13, line, size=_SMALL, ink=_GREY)
        y += _LINE
    return y


def _remarks(canvas: Canvas, plan: Plan, x: float, y: float, room: float) -> float:
    """What star and replica mean, and which dimensions are not drawn because they are one wide."""
    canvas.star(x + 7, y + 8, 7)
    y = _paragraph(
        canvas, "leads its attention-TP group: takes its requests, draws its tokens", x + 20, y, room - 20
    )
    if plan.widths["attn_dp"] > 1:
        y = _paragraph(canvas, f"replica N is rank N of attn_dp: {MEANING['attn_dp']}", x, y, room)
    if plan.flat():
        y = _paragraph(
            canvas, f"one wide, so every rank is rank 0 there: {', '.join(plan.flat())}", x, y, room
        )
    return y

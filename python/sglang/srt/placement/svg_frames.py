"""Owns how boxes nest and fill a page: sizes and labels in, positions out.

Used by the placement picture. It must not draw, and must not know what a box stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang.srt.placement.svg_canvas import text_width

LABEL_SIZE, LABEL_HEIGHT = 14.0, 24.0
PADDING, _GAP = 8.0, 6.0
_MOST_ACROSS = 8


@dataclass(kw_only=True)
class Area:
    """A box of a given size, or with `parts` a frame around them: named where it has a label, else bare.

    `x` and `y` are relative to the frame around it once that is arranged.
    """

    label: str = ""
    parts: Sequence[Area] = ()
    content: object = None
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0

    def arrange(self, room: float) -> None:
        """Put the parts into lines of equal length inside `room`, each where a grid has it."""
        if not self.parts:
            return
        edge, head = (PADDING, LABEL_HEIGHT) if self.label else (0.0, 0.0)
        for part in self.parts:
            part.arrange(room - 2 * edge)
        step = max(part.width for part in self.parts) + _GAP
        line_height = max(part.height for part in self.parts) + _GAP
        fit = int((room - 2 * edge + _GAP) // step)
        across = columns(len(self.parts), fit, most_lines=max(1, int(room // line_height)))
        y = head
        for start in range(0, len(self.parts), across):
            line = self.parts[start : start + across]
            for column, part in enumerate(line):
                part.x, part.y = edge + column * step, y
            y += max(part.height for part in line) + _GAP
        label = text_width(self.label, LABEL_SIZE, bold=True)
        self.width = max(across * step - _GAP, label) + 2 * edge
        self.height = y - _GAP + edge

    def placed(self, x: float, y: float, depth: int = 0) -> Iterator[tuple[Area, float, float, int]]:
        """This area and all inside it: area, x, y on the page, and how many named frames are around it.

        A frame comes before its parts.
        """
        yield self, x + self.x, y + self.y, depth
        for part in self.parts:
            yield from part.placed(x + self.x, y + self.y, depth + bool(self.label))


def columns(count: int, fit: int, *, most_lines: int) -> int:
    """How many of `count` boxes to put in a line where `fit` would fit.

    The most, down to half of `fit`, that fill every line and make no more than `most_lines` (more would be
    taller than the room is wide); else as many as make lines of about one length.
    """
    fit = max(1, min(fit, count, _MOST_ACROSS))
    for across in range(fit, (fit - 1) // 2, -1):
        if count % across == 0 and count // across <= most_lines:
            return across
    return -(-count // -(-count // fit))

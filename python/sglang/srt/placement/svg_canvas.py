"""Owns the few SVG elements that the picture needs: boxes, words, stars, and how wide words will be.

Used by the placement picture. It must not know what is drawn, and must not need a font file, script or link.
"""

from __future__ import annotations

import math
from html import escape

#: Advance widths in em of the widest common sans-serif (DejaVu), rounded up by kind of letter: a viewer's own
#: font must not overflow its box.
_NARROW, _NARROW_EM = frozenset(" !'(),-./:;I[]fijlrt|"), 0.43
_COMMON, _COMMON_EM = frozenset("0123456789_abcdeghknopqsuvxyz"), 0.64
_WIDE_EM = 1.0
_BOLD = 1.16


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width that these words may take in any common sans-serif."""
    em = sum(
        _NARROW_EM if letter in _NARROW else _COMMON_EM if letter in _COMMON else _WIDE_EM for letter in text
    )
    return em * size * (_BOLD if bold else 1.0)


def wrap(text: str, size: float, room: float, *, bold: bool = False) -> list[str]:
    """The words broken into lines that fit into the room."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def ink_on(colour: str) -> str:
    """Black or white, whichever stands out more on this colour (contrast as WCAG counts it)."""
    parts = [channel / 255 for channel in _channels(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#fff"


class Canvas:
    """Elements in drawing order; `page` puts them into a picture of the given size."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str = "none",
        stroke: float = 1.0,
        name: str = "",
    ) -> None:
        named = f' class="{escape(name)}"' if name else ""
        self._parts.append(
            f'<rect{named} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{edge}" stroke-width="{stroke:g}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        ink: str = "#000",
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """One line whose baseline is `y`."""
        style = (' font-weight="bold"' if bold else "") + (
            f' text-anchor="{anchor}"' if anchor != "start" else ""
        )
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{ink}"{style}>'
            f"{escape(text, quote=False)}</text>"
        )

    def star(self, x: float, y: float, radius: float) -> None:
        """A five-pointed star around a centre."""
        points = []
        for corner in range(10):
            reach = radius if corner % 2 == 0 else radius * 0.42
            angle = math.pi * (corner / 5 - 0.5)
            points.append(f"{x + reach * math.cos(angle):.1f},{y + reach * math.sin(angle):.1f}")
        self._parts.append(f'<polygon points="{" ".join(points)}" fill="#000"/>')

    def page(self, width: float, height: float, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="sans-serif">\n'
            f"<title>{escape(title, quote=False)}</title>\n"
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"

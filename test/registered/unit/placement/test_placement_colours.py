"""The colours of groups: apart for as many groups as a picture draws, and the same in boxes and lists."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from sglang.srt.placement import picture as placement_picture
from sglang.srt.placement.picture import MOST_DRAWN, colours_of, draw, letter_of
from sglang.srt.placement.plan import plan_from_flags
from sglang.srt.placement.svg_canvas import ink_on

Colours = tuple[str, str | None]
Matrix = tuple[tuple[float, float, float], ...]

#: From linear sRGB to XYZ under D65.
_XYZ = ((0.41246, 0.35758, 0.18044), (0.21267, 0.71515, 0.07218), (0.01933, 0.11919, 0.95030))
_WHITE = (0.95047, 1.0, 1.08883)
#: What an eye without red or green cones sees, in linear sRGB (Machado, Oliveira and Fernandes, 2009).
_WITHOUT = {
    "red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}
#: In CIELAB; 2.3 is just noticed side by side, so these are told apart across a page.
_FAR, _FAR_WITH_TWO_CONES = 20.0, 12.0


def _times(matrix: Matrix, values: Sequence[float]) -> list[float]:
    return [sum(factor * value for factor, value in zip(row, values)) for row in matrix]


def _linear(colour: str) -> list[float]:
    long = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(long[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _lab(linear: Sequence[float]) -> tuple[float, float, float]:
    shares = [value / white for value, white in zip(_times(_XYZ, linear), _WHITE)]
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _distance(one: str, other: str, without: str = "") -> float:
    seen = [_linear(colour) for colour in (one, other)]
    if without:
        seen = [[min(max(v, 0.0), 1.0) for v in _times(_WITHOUT[without], linear)] for linear in seen]
    return math.dist(_lab(seen[0]), _lab(seen[1]))


def _alike(groups: Sequence[Colours]) -> list[tuple[int, int]]:
    """Groups that a reader could confuse by colour: neither their fill nor their stripe lies far apart."""

    def apart(one: str | None, other: str | None) -> bool:
        if one is None or other is None:
            return one is not other
        return _distance(one, other) >= _FAR

    return [
        (at, to)
        for (at, one), (to, other) in combinations(enumerate(groups), 2)
        if not any(map(apart, one, other))
    ]


def _drawn(flags: str, kind: str) -> list[Colours]:
    """Fill and stripe of each group that a picture lists of one kind."""
    elements = list(ElementTree.fromstring(draw(plan_from_flags(flags.split(), prog="test"))))
    groups: list[Colours] = []
    for element, after in pairwise(elements):
        if element.get("class") == f"group {kind}":
            stripe = after.get("fill") if after.get("class") == "stripe" else None
            groups.append((element.get("fill", ""), stripe))
    return groups


@pytest.mark.parametrize(
    "flags, kind, count",
    [("--tp-size 8 --attn-dp-size 4 --pp-size 2", "attn_tp", 8), ("--tp-size 128 --pp-size 2", "pp", 128)],
    ids=["eight", "as many as there can be"],
)
def test_no_two_groups_of_a_kind_look_alike(flags: str, kind: str, count: int) -> None:
    """Tints once repeated after four groups, so that the fifth looked like the first."""
    groups = _drawn(flags, kind)
    assert len(groups) == count <= MOST_DRAWN // 2
    assert _alike(groups) == []


def test_tints_that_repeat_would_be_noticed(monkeypatch: Any) -> None:
    """The twins: four tints over and over, and stripes left out."""
    monkeypatch.setattr(placement_picture, "colours_of", lambda index: (colours_of(index % 4)[0], None))
    assert (0, 4) in _alike(_drawn("--tp-size 8 --attn-dp-size 4 --pp-size 2", "attn_tp"))
    monkeypatch.setattr(placement_picture, "colours_of", lambda index: (colours_of(index)[0], None))
    assert (0, 12) in _alike(_drawn("--tp-size 128 --pp-size 2", "pp"))


def _closest(tints: Sequence[str], without: str) -> float:
    return min(_distance(one, other, without) for one, other in combinations(tints, 2))


@pytest.mark.parametrize("without", list(_WITHOUT))
def test_tints_lie_apart_for_eyes_with_two_kinds_of_cones(without: str) -> None:
    """The twin is red and green of one lightness, which differ for most eyes only."""
    assert _closest(placement_picture._TINTS, without) >= _FAR_WITH_TWO_CONES
    confused = {"red": ("#c98787", "#939385"), "green": ("#d08a78", "#a0a078")}[without]
    assert _distance(*confused) >= _FAR and _closest(confused, without) < _FAR_WITH_TWO_CONES


def _contrast(one: str, other: str) -> float:
    low, high = sorted(_times(_XYZ, _linear(colour))[1] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_ink_stands_out_on_every_colour() -> None:
    """4.5 to 1 is what the accessibility guidelines ask of small text; white on these tints is the twin."""
    for tint in placement_picture._TINTS:
        assert _contrast(tint, ink_on(tint)) >= 4.5 > _contrast(tint, "#fff"), tint
    assert ink_on("#222222") == "#fff"


def test_a_letter_has_one_colour_in_boxes_and_lists() -> None:
    """Colour only repeats the letter: readers of letters miss nothing, readers of colours are not misled."""
    flags = "--tp-size 8 --pp-size 2 --attn-dp-size 2 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2"
    root = ElementTree.fromstring(draw(plan_from_flags(flags.split(), prog="test")))
    fills: dict[str, set[str | None]] = {}
    chip, letters = None, {letter_of(index) for index in range(8)}
    for element in root:
        if (element.get("class") or "").split(" ")[0] in ("chip", "group"):
            chip = element.get("fill")
        elif element.text in letters:
            fills.setdefault(element.text, set()).add(chip)
    assert fills == {letter_of(index): {colours_of(index)[0]} for index in range(8)}


def test_letters_go_on_after_z() -> None:
    assert [letter_of(index) for index in (0, 25, 26, 51, 52, 127)] == ["A", "Z", "AA", "AZ", "BA", "DX"]

"""The drawn layout: well-formed, nothing outside the page, nothing printed over something else."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sglang.placement import main
from sglang.srt.entrypoints.placement_picture import MOST_DRAWN, draw
from sglang.srt.entrypoints.placement_plan import DIMENSIONS, Plan, plan_from_flags
from sglang.srt.entrypoints.svg_canvas import ink_on, text_width, tint, wrap

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = {
    "one rank": "",
    "attention dp": "--tp-size 2 --attn-dp-size 2",
    "worked": "--tp-size 8 --pp-size 2 --attn-dp-size 2 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2",
    "replicas": "--tp-size 4 --dp-size 2",
    "machines": "--tp-size 16 --attn-dp-size 4 --dcp-size 2 --nnodes 2",
    "odd": "--tp-size 11 --pp-size 3",
    "many groups": "--tp-size 104 --attn-dp-size 104",
}


@dataclass
class Box:
    x: float
    y: float
    width: float
    height: float
    what: str = ""

    def overlaps(self, other: "Box") -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )

    def holds(self, other: "Box") -> bool:
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.x + other.width <= self.x + self.width
            and other.y + other.height <= self.y + self.height
        )


def _plan(flags: str) -> Plan:
    return plan_from_flags(flags.split(), prog="test")


def _number(element: Any, name: str) -> float:
    return float(element.get(name, "0"))


def _rects(root: Any, kind: str) -> list[Box]:
    return [
        Box(*(_number(rect, name) for name in ("x", "y", "width", "height")), what=rect.get("class"))
        for rect in root.iter(f"{SVG}rect")
        if (rect.get("class") or "").split(" ")[0] == kind
    ]


def _texts(root: Any) -> list[Box]:
    """Room of each line of text, as wide as a generous face would set it."""
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size = _number(element, "font-size")
        width = text_width(element.text, size, bold=element.get("font-weight") == "bold")
        shift = {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        boxes.append(
            Box(_number(element, "x") - shift, _number(element, "y") - 0.8 * size, width, size, element.text)
        )
    return boxes


def _page(root: Any) -> Box:
    return Box(*map(float, root.get("viewBox").split()))


def _overlapping(boxes: list[Box]) -> list[tuple[str, str]]:
    return [
        (one.what, other.what)
        for at, one in enumerate(boxes)
        for other in boxes[at + 1 :]
        if one.overlaps(other)
    ]


@pytest.fixture(params=list(LAYOUTS))
def drawn(request: Any) -> tuple[Plan, Any]:
    plan = _plan(LAYOUTS[request.param])
    return plan, ElementTree.fromstring(draw(plan))


def test_each_rank_has_one_cell_and_cells_lie_apart(drawn: tuple[Plan, Any]) -> None:
    plan, root = drawn
    cells = _rects(root, "rank")
    assert len(cells) == len(plan.seats)
    assert _overlapping(cells) == []
    assert all(_page(root).holds(cell) for cell in cells)


def test_each_kind_of_group_shows_each_rank_once_with_its_group(drawn: tuple[Plan, Any]) -> None:
    plan, root = drawn
    members = _rects(root, "member")
    texts = _texts(root)
    for group in plan.groups:
        cells = [cell for cell in members if cell.what == f"member {group.kind}"]
        if group.width == 1:
            assert cells == []
            continue
        shown: dict[int, list[int]] = {}
        for cell in cells:
            rank, name = (text.what for text in texts if cell.holds(text))
            shown.setdefault(int(name.split()[1]), []).append(int(rank))
        assert shown == {index: list(ranks) for index, ranks in enumerate(group.lists)}, group.kind
    assert _overlapping(members) == []


def test_a_cell_shows_every_rank_that_is_more_than_zero_wide(drawn: tuple[Plan, Any]) -> None:
    plan, root = drawn
    texts = _texts(root)
    for seat, cell in zip(plan.seats, _rects(root, "rank")):
        words = [text.what for text in texts if cell.holds(text)]
        expected = [f"rank {seat.world_rank}"]
        for name in plan.wide():
            expected += [name, str(seat.ranks[name])]
        assert words == (expected if plan.wide() else [*expected, "alone"])


def test_no_word_lies_over_another_or_outside_the_page(drawn: tuple[Plan, Any]) -> None:
    _, root = drawn
    texts = _texts(root)
    assert _overlapping(texts) == []
    page = _page(root)
    assert [text.what for text in texts if not page.holds(text)] == []


def test_words_stay_legible_when_the_picture_is_twelve_hundred_wide(drawn: tuple[Plan, Any]) -> None:
    _, root = drawn
    scale = 1200 / _page(root).width
    assert min(_number(text, "font-size") for text in root.iter(f"{SVG}text")) * scale >= 12


def test_the_picture_needs_nothing_from_elsewhere(drawn: tuple[Plan, Any]) -> None:
    plan, _ = drawn
    text = draw(plan)
    assert "href" not in text and "url(" not in text and "<script" not in text and "@font" not in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_ink_stands_out_on_every_colour() -> None:
    """4.5 to 1 is what the accessibility guidelines ask of small text."""

    def light(colour: str) -> float:
        long = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
        parts = [int(long[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    from sglang.srt.entrypoints import placement_picture

    assert set(placement_picture._COLOURS) == set(DIMENSIONS)
    assert len(set(placement_picture._COLOURS.values())) == len(DIMENSIONS)
    for colour in placement_picture._COLOURS.values():
        for strength in placement_picture._STRENGTHS:
            fill = tint(colour, strength)
            brighter, darker = sorted((light(fill), light(ink_on(fill))), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) >= 4.5, fill


def test_an_overlap_would_be_noticed() -> None:
    """The twin of the overlap check: one cell shifted onto its neighbour, one word pushed off the page."""
    text = draw(_plan("--tp-size 2"))
    root = ElementTree.fromstring(text)
    first = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "rank")
    first.set("x", str(_number(first, "x") + 20))
    assert _overlapping(_rects(root, "rank")) == [("rank", "rank")]
    word = next(root.iter(f"{SVG}text"))
    word.set("x", "100000")
    assert not all(_page(root).holds(box) for box in _texts(root))


def test_the_file_holds_the_picture_and_the_table_is_printed_too(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layout.svg"
    assert main(["--tp-size", "2", "--svg", str(file)]) == 0
    assert capsys.readouterr().out.startswith("2 ranks: pp 1 x tp 2\n")
    assert file.read_text(encoding="utf-8") == draw(_plan("--tp-size 2"))


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_printed(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "no such folder" / "layout.svg"
    assert main(["--svg", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and str(file) in shown.err and "No such file" in shown.err


def test_a_picture_that_no_page_could_show_is_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "layout.svg"
    assert main(["--tp-size", str(MOST_DRAWN + 1), "--svg", str(file)]) == 2
    assert str(MOST_DRAWN + 1) in capsys.readouterr().err and not file.exists()
    assert main(["--tp-size", str(MOST_DRAWN), "--svg", str(file)]) == 0 and file.exists()


def test_flags_are_escaped_in_the_picture() -> None:
    """The canvas must stay well-formed whatever it is given to write."""
    from sglang.srt.entrypoints.svg_canvas import Canvas

    canvas = Canvas()
    canvas.words(0, 10, 'a < b & "c"', size=10)
    page = ElementTree.fromstring(canvas.page(100, 20, "<title> & more"))
    assert [text.text for text in page.iter(f"{SVG}text")] == ['a < b & "c"']


def test_the_picture_on_the_page_is_the_one_that_its_command_draws() -> None:
    docs = Path(__file__).resolve().parents[4] / "docs"
    (flags,) = re.findall(
        r"sglang\.placement (.+) --svg docs/layout\.svg`", (docs / "parallel.md").read_text("utf-8")
    )
    assert (docs / "layout.svg").read_text(encoding="utf-8") == draw(_plan(flags))


def test_lines_are_broken_only_between_words() -> None:
    assert wrap("one two three", 10, text_width("one two", 10)) == ["one two", "three"]
    assert wrap("incomprehensible", 10, 20) == ["incomprehensible"]

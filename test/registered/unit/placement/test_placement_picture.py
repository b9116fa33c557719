"""The drawn layout: what is framed is what belongs together, nothing lies over something else or outside."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sglang.placement import main
from sglang.srt.placement import picture as placement_picture
from sglang.srt.placement import svg_frames
from sglang.srt.placement.picture import MOST_DRAWN, draw
from sglang.srt.placement.plan import Group, Plan, plan_from_flags
from sglang.srt.placement.svg_canvas import Canvas, text_width, wrap

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = {
    "one rank": "",
    "attention dp": "--tp-size 2 --attn-dp-size 2",
    "worked": "--tp-size 8 --pp-size 2 --attn-dp-size 2 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2",
    "replicas": "--tp-size 4 --dp-size 2",
    "replicas of stages": "--tp-size 2 --pp-size 2 --dp-size 3",
    "replicas that fill no line": "--tp-size 4 --pp-size 3 --dp-size 5",
    "a stage on two machines": "--tp-size 4 --pp-size 3 --nnodes 2",
    "a replica on two machines": "--tp-size 6 --attn-dp-size 3 --nnodes 2",
    "machines": "--tp-size 16 --attn-dp-size 4 --dcp-size 2 --nnodes 2",
    "odd": "--tp-size 11 --pp-size 3",
    "many replicas": "--tp-size 104 --attn-dp-size 104",
    "many groups": "--tp-size 128 --pp-size 2",
    "long lists": "--tp-size 128 --ep-size 64",
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


def _frames(root: Any) -> list[Box]:
    return [
        Box(box.x, box.y, box.width, box.height, box.what.removeprefix("frame "))
        for box in _rects(root, "frame")
    ]


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


def _cuts(plan: Plan) -> dict[tuple[str, ...], list[list[int]]]:
    """Kinds of groups that are the same lists of ranks, with these lists."""
    kinds: dict[str, tuple[str, ...]] = {}
    lists = {}
    for group in plan.groups:
        if group.width > 1 and group.collective:
            ranks = [list(ranks) for ranks in group.lists]
            kinds[str(ranks)] = (*kinds.get(str(ranks), ()), group.kind)
            lists[str(ranks)] = ranks
    return {kinds[text]: lists[text] for text in kinds}


def _letter(index: int) -> str:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[index] if index < 26 else letters[index // 26 - 1] + letters[index % 26]


def _listed(root: Any) -> Iterator[tuple[str, str, list[int]]]:
    """Kind, letter and ranks of each group, as they follow each other on the page."""
    elements = list(root)
    for at, element in enumerate(elements):
        if (element.get("class") or "").startswith("group "):
            words = []
            for after in elements[at + 1 :]:
                if after.tag == f"{SVG}text":
                    words.append(after.text)
                elif after.get("class") != "stripe":
                    break
            # The last group is followed by other words; its list ends with the bracket.
            closed = next(at for at, word in enumerate(words) if word.endswith("]"))
            text = " ".join(words[1 : closed + 1]).strip("[]")
            runs = [list(map(int, run.split(".."))) for run in text.split(",")]
            ranks = [rank for run in runs for rank in range(run[0], run[-1] + 1)]
            yield element.get("class").split(" ")[1], words[0], ranks


def test_equal_partitions_are_listed_once_with_each_group_and_its_letter(drawn: tuple[Plan, Any]) -> None:
    plan, root = drawn
    assert list(_listed(root)) == [
        (kinds[0], _letter(index), ranks)
        for kinds, lists in _cuts(plan).items()
        for index, ranks in enumerate(lists)
    ]
    bold = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    for kinds in _cuts(plan):
        assert bold.count(" = ".join(kinds)) == 1


def test_a_partition_that_is_drawn_twice_would_be_noticed(monkeypatch: Any) -> None:
    """The twin: every kind a partition of its own, as before equal ones became one."""
    merged = placement_picture.partitions

    def apart(groups: list[Group]) -> list[Any]:
        return [cut for group in groups for cut in merged([group])]

    plan = _plan("--tp-size 8")
    assert [kind for kind, _, _ in _listed(ElementTree.fromstring(draw(plan)))] == ["tp"]
    monkeypatch.setattr(placement_picture, "partitions", apart)
    root = ElementTree.fromstring(draw(plan))
    assert [kind for kind, _, _ in _listed(root)] == ["tp", "attn_tp", "moe_tp"]
    assert "tp = attn_tp = moe_tp" not in [text.what for text in _texts(root)]


def test_a_box_shows_the_letter_of_each_group_of_its_rank_and_the_place_in_it(
    drawn: tuple[Plan, Any],
) -> None:
    plan, root = drawn
    texts = _texts(root)
    cuts = _cuts(plan)
    for seat, box in zip(plan.seats, _rects(root, "rank")):
        expected = [f"rank {seat.world_rank}"]
        for (first, *others), lists in cuts.items():
            index = next(at for at, ranks in enumerate(lists) if seat.world_rank in ranks)
            expected += [first, *(f"= {kind}" for kind in others), str(seat.ranks[first]), _letter(index)]
            assert all(seat.ranks[kind] == seat.ranks[first] for kind in others)
        assert [text.what for text in texts if box.holds(text)] == expected


def _marks(root: Any) -> list[float]:
    """How far right in its box each rank's mark stands, where a rank has one mark."""
    return [mark.x - box.x for box, mark in zip(_rects(root, "rank"), _rects(root, "place"), strict=True)]


def test_marks_tell_the_ranks_of_one_group_apart(monkeypatch: Any) -> None:
    """One group has one colour, so it is the place that tells rank 0 from rank 4; the twin draws no place."""
    plan = _plan("--tp-size 8")
    offsets = _marks(ElementTree.fromstring(draw(plan)))
    assert all(later - earlier >= 10 for earlier, later in pairwise(offsets))
    real = placement_picture._track
    monkeypatch.setattr(
        placement_picture,
        "_track",
        lambda canvas, member, *place: real(canvas, replace(member, place=member.place % 4), *place),
    )
    offsets = _marks(ElementTree.fromstring(draw(plan)))
    assert offsets[0] == offsets[4]


def _expected_frames(plan: Plan) -> Counter[tuple[str, frozenset[int]]]:
    """Label of each frame and the seats (by their place in the plan) that belong into it."""
    frames: dict[tuple[Any, ...], set[int]] = {}
    for at, seat in enumerate(plan.seats):
        stage = (seat.dp_rank, seat.ranks["pp"])
        if plan.num_worlds > 1:
            frames.setdefault(("replica", seat.dp_rank), set()).add(at)
        if plan.nodes > 1:
            frames.setdefault(("node", seat.node), set()).add(at)
        if plan.widths["pp"] > 1:
            frames.setdefault(("stage", seat.ranks["pp"], stage, seat.node), set()).add(at)
        if plan.widths["attn_dp"] > 1:
            frames.setdefault(("replica", seat.ranks["attn_dp"], stage, seat.node), set()).add(at)
    begun = set()
    labels: Counter[tuple[str, frozenset[int]]] = Counter()
    for key, seats in sorted(frames.items(), key=lambda item: min(item[1])):
        label = f"{key[0]} {key[1]}"
        if key[:3] in begun:
            label += ", continued"
        begun.add(key[:3])
        labels[label, frozenset(seats)] += 1
    return labels


def _framed(root: Any) -> Counter[tuple[str, frozenset[int]]]:
    cells = _rects(root, "rank")
    return Counter(
        (frame.what, frozenset(at for at, cell in enumerate(cells) if frame.overlaps(cell)))
        for frame in _frames(root)
    )


def test_each_replica_machine_and_stage_is_framed_with_exactly_its_ranks(drawn: tuple[Plan, Any]) -> None:
    plan, root = drawn
    assert _framed(root) == _expected_frames(plan)
    things = [*_frames(root), *_rects(root, "rank")]
    for at, one in enumerate(things):
        for other in things[at + 1 :]:
            assert one.holds(other) or not one.overlaps(other), (one.what, other.what)
    labels = [text for text in _texts(root) if re.match("(replica|node|stage) [0-9]", text.what)]
    for frame in _frames(root):
        assert next(text.what for text in labels if frame.holds(text)) == frame.what


def test_a_rank_in_the_frame_of_another_replica_would_be_noticed() -> None:
    """The twin: the box of the second rank moved over into the second frame."""
    plan = _plan("--tp-size 4 --attn-dp-size 2")
    root = ElementTree.fromstring(draw(plan))
    assert _framed(root) == _expected_frames(plan)
    first, second = _frames(root)
    box = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "rank"][1]
    box.set("x", str(_number(box, "x") + second.x - first.x))
    assert _framed(root) != _expected_frames(plan)


def _fullness(root: Any) -> float:
    """Share of the band of ranks, from edge to edge of the page, that the outermost frames or boxes fill."""
    things = [*_frames(root), *_rects(root, "rank")]
    outermost = [one for one in things if not any(o is not one and o.holds(one) for o in things)]
    top = min(thing.y for thing in outermost)
    bottom = max(thing.y + thing.height for thing in outermost)
    page = _page(root)
    return sum(thing.width * thing.height for thing in outermost) / ((bottom - top) * page.width)


@pytest.mark.parametrize("layout", ["worked", "replicas", "replicas of stages", "machines", "many replicas"])
def test_ranks_fill_the_page_from_edge_to_edge(layout: str, monkeypatch: Any) -> None:
    """Two replicas once stood under each other beside an empty half; the twin puts all under each other."""
    plan = _plan(LAYOUTS[layout])
    assert _fullness(ElementTree.fromstring(draw(plan))) >= 0.8
    monkeypatch.setattr(svg_frames, "columns", lambda count, fit, most_lines: 1)
    assert _fullness(ElementTree.fromstring(draw(plan))) < 0.5


@pytest.mark.parametrize("flags", [LAYOUTS["replicas that fill no line"], "--tp-size 4 --pp-size 13"])
def test_frames_that_fill_no_line_are_no_strip_either(flags: str, monkeypatch: Any) -> None:
    """Five replicas, of which two fit beside each other, stood in one column, five times as high as wide. The
    twin asks for full lines however many they are.
    """
    page = _page(ElementTree.fromstring(draw(_plan(flags))))
    assert page.height < 2 * page.width
    real = svg_frames.columns
    monkeypatch.setattr(
        svg_frames, "columns", lambda count, fit, most_lines: real(count, fit, most_lines=count)
    )
    page = _page(ElementTree.fromstring(draw(_plan(flags))))
    assert page.height > 4 * page.width


@pytest.mark.parametrize("layout", ["one rank", "attention dp"])
def test_few_ranks_have_their_groups_beside_them(layout: str) -> None:
    root = ElementTree.fromstring(draw(_plan(LAYOUTS[layout])))
    right = max(box.x + box.width for box in [*_frames(root), *_rects(root, "rank")])
    heading = next(text for text in _texts(root) if re.match("Groups|Every rank", text.what))
    assert heading.x > right and heading.y < _rects(root, "rank")[0].y + 40


def _overflowing(root: Any) -> list[str]:
    """Words that begin (or end, where they are set from the right) in a box and do not stay in it."""
    boxes = [box for kind in ("rank", "chip", "frame", "group") for box in _rects(root, kind)]
    wrong = []
    for element, words in zip(root.iter(f"{SVG}text"), _texts(root)):
        point = Box(_number(element, "x"), _number(element, "y") - 1, 0, 0)
        around = [box for box in boxes if box.holds(point)]
        if around and not min(around, key=lambda box: box.width * box.height).holds(words):
            wrong.append(words.what)
    return wrong


def test_words_stay_inside_the_box_in_which_they_stand(drawn: tuple[Plan, Any]) -> None:
    _, root = drawn
    assert _overflowing(root) == []


def test_a_word_too_long_for_its_box_would_be_noticed(monkeypatch: Any) -> None:
    """The twins: a longer label on a frame, a longer letter in a box, a longer name."""
    root = ElementTree.fromstring(draw(_plan("--tp-size 2 --attn-dp-size 2")))
    for was, longer in (("replica 1", "the replica numbered 1"), ("A", "GROUPAAAAAAA"), ("tp", "x" * 16)):
        word = next(text for text in root.iter(f"{SVG}text") if text.text == was)
        word.text = longer
        assert _overflowing(root) == [longer]
        word.text = was


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


def test_what_is_written_on_a_page_is_escaped() -> None:
    """The canvas must stay well-formed whatever it is given to write."""
    canvas = Canvas()
    canvas.words(0, 10, 'a < b & "c"', size=10)
    canvas.box(0, 0, 1, 1, fill="#fff", name='frame "><script>')
    page = ElementTree.fromstring(canvas.page(100, 20, "<title> & more"))
    assert [text.text for text in page.iter(f"{SVG}text")] == ['a < b & "c"']
    assert [box.what for box in _rects(page, "frame")] == ['frame "><script>']


def test_the_picture_on_the_page_is_the_one_that_its_command_draws() -> None:
    docs = Path(__file__).resolve().parents[4] / "docs"
    (flags,) = re.findall(
        r"sglang\.placement (.+) --svg docs/layout\.svg`", (docs / "parallel.md").read_text("utf-8")
    )
    assert (docs / "layout.svg").read_text(encoding="utf-8") == draw(_plan(flags))


def test_lines_are_broken_only_between_words() -> None:
    assert wrap("one two three", 10, text_width("one two", 10)) == ["one two", "three"]
    assert wrap("incomprehensible", 10, 20) == ["incomprehensible"]


@pytest.mark.parametrize(
    "text, em, em_bold",
    [
        ("tp = attn_tp = moe_tp", 11.26, 12.40),
        ("[0,1,2,3] [8..15]", 7.92, 8.95),
        ("leads its attention-TP group", 13.87, 15.86),
        ("rank 128", 4.46, 4.98),
        ("mmWW@", 4.93, 5.29),
    ],
)
def test_words_are_given_the_room_that_a_wide_face_takes(text: str, em: float, em_bold: float) -> None:
    """Measured with DejaVu Sans, the widest that is common; room for half as much again would be waste."""
    assert em <= text_width(text, 1.0) <= 1.5 * em
    assert em_bold <= text_width(text, 1.0, bold=True) <= 1.5 * em_bold

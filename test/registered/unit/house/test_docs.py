"""What the pages say is so: worked layouts, floor members, and every path they name."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import re
from pathlib import Path

import pytest

import check_import_floors
from sglang.srt.distributed.group_layout import GroupSizes, layout

ROOT = Path(__file__).resolve().parents[4]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "sgl-kernel").glob("*.md")])


def worked_layouts(page: str) -> list[tuple[dict[str, int], dict[str, str]]]:
    """Each `### tp_size=... ` heading of the page with the rows of the table below it."""
    found = []
    for section in page.split("\n### ")[1:]:
        sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", section.splitlines()[0])}
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", section.split("\n## ")[0], re.MULTILINE)
        found.append((sizes, dict(rows)))
    return found


def test_the_worked_layouts_are_what_the_code_computes():
    """A worked example that is wrong teaches the wrong number system."""
    layouts = worked_layouts((ROOT / "docs" / "parallel.md").read_text(encoding="utf-8"))
    assert len(layouts) == 3
    for sizes, rows in layouts:
        if sizes == {"tp_size": 4}:
            sizes = {"tp_size": 4, "attn_tp_size": 4, "moe_tp_size": 4}
        computed = layout(GroupSizes(**sizes))
        for name, shown in rows.items():
            assert shown == " ".join(str(group).replace(" ", "") for group in computed[name]), (sizes, name)
        assert len(rows) >= 5


def test_every_floor_member_is_named_on_the_floors_page():
    page = (ROOT / "docs" / "floors.md").read_text(encoding="utf-8")
    for member, rank, _ in check_import_floors.load_rules().floors:
        if member.startswith("=") or rank[0] == 8:
            continue
        path = ROOT / "python" / member.replace(".", "/")
        if member.endswith("*") or path.exists() or path.with_suffix(".py").exists():
            assert member.rpartition(".")[2] in page, f"docs/floors.md does not name {member}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_that_a_page_names_is_there(page):
    """A page that sends its reader to a file that has moved is worse than none."""
    missing = [name for name in named_paths(page.read_text(encoding="utf-8")) if not exists(name)]
    assert missing == [], missing


def named_paths(text: str) -> list[str]:
    """What a page writes in backticks and spells like a file of ours: with a slash and a suffix."""
    spelled = re.findall(r"`([\w.\-/]+/[\w.\-]+\.(?:py|toml|md|txt|h|cpp|yaml))`", text)
    return [name for name in spelled if not name.startswith("..")]


def exists(name: str) -> bool:
    bases = (
        ROOT,
        ROOT / "python",
        ROOT / "python" / "sglang",
        ROOT / "python" / "sglang" / "srt",
        ROOT / "sgl-kernel",
    )
    return any((base / name).exists() for base in bases)


def test_a_path_that_is_not_there_would_be_noticed():
    planted = "See `srt/environ.py`, `srt/nowhere/thing.py` and `docs/floors.md`."
    assert [name for name in named_paths(planted) if not exists(name)] == ["srt/nowhere/thing.py"]

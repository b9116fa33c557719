"""The generated page matches the declarations, and the check would notice one that does not."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

import gen_config_docs
from sglang.srt.arg_groups.arg_utils import Arg, Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.environ import Envs


def test_the_page_matches_the_declarations():
    assert not gen_config_docs.outdated()


def test_a_changed_declaration_makes_the_page_stale(monkeypatch, capsys):
    changed = Leaf("tp_size", "parallel", str, "two", Arg(help="A changed field.", served=True), "str")
    monkeypatch.setitem(LEAVES, "tp_size", changed)
    assert gen_config_docs.main(["--check"]) == 1
    assert "gen_config_docs.py" in capsys.readouterr().err


def test_every_flag_stands_in_exactly_one_of_the_two_lists():
    page = gen_config_docs.page()
    served, refused = page.split("## Declared, not served yet")
    for leaf in LEAVES.values():
        for flag in leaf.flags:
            lines = [
                line
                for line in page.splitlines()
                if line.startswith("|") and f"`{flag}`" in line.split("|")[1]
            ]
            assert len(lines) == 1, flag
            assert lines[0] in (refused if leaf.arg.served is False else served), flag


def test_every_environment_variable_is_on_the_page():
    page = gen_config_docs.page()
    assert all(f"| `{name}` |" in page for name in Envs.declared())


@pytest.mark.parametrize(
    ("tp", "text"),
    [
        (int, "int"),
        (int | None, "int | None"),
        (list[str] | None, "list[str] | None"),
        (dict[str, int], "dict[str, int]"),
    ],
)
def test_types_are_written_as_source(tp, text):
    assert gen_config_docs.type_text(tp) == text

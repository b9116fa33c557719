"""A setting that is accepted acts: whatever is declared served is read by the engine itself."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import ast
from collections.abc import Iterable
from pathlib import Path

import sglang
from sglang.srt.arg_groups.arg_utils import Arg, Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.environ import Envs

PACKAGE = Path(next(iter(sglang.__path__))).resolve()
#: Declaring, checking and resolving a setting is not yet acting on it.
CONFIGURATION = ("srt/arg_groups/", "srt/server_args.py", "test/")


def attributes_read(sources: Iterable[str]) -> set[str]:
    """Names after a dot, in code alone: a docstring that praises a setting does not read it."""
    found: set[str] = set()
    for text in sources:
        found |= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    return found


def engine_sources() -> list[str]:
    paths = list(PACKAGE.rglob("*.py"))
    return [
        path.read_text(encoding="utf-8")
        for path in paths
        if not path.relative_to(PACKAGE).as_posix().startswith(CONFIGURATION)
    ]


def ignored(leaves: Iterable[Leaf], read: set[str]) -> list[str]:
    """Settings whose every value is taken and whose name nobody reads."""
    return [leaf.label for leaf in leaves if leaf.arg.served is True and leaf.name not in read]


def test_no_served_setting_is_silently_ignored():
    assert ignored(LEAVES.values(), attributes_read(engine_sources())) == []


def test_a_planted_setting_that_nobody_reads_is_noticed():
    planted = Leaf("fastest_mode", "serving", bool, False, Arg(help="p.", served=True), "switch")
    text = '"""get_serving().fastest_mode is wonderful."""\nfastest_mode = 1\n'
    assert ignored([planted], attributes_read([text])) == ["--fastest-mode"]
    assert ignored([planted], attributes_read(["x = get_serving().fastest_mode"])) == []


def variables_used(sources: Iterable[str]) -> set[str]:
    """Names after a dot (`envs.NAME.get()`) and of keywords (`child_environment(NAME=...)`)."""
    found = attributes_read(sources)
    for text in sources:
        found |= {node.arg or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)}
    return found


def test_every_declared_environment_variable_is_used():
    """A variable on the docs page that nobody looks up would be set in vain."""
    paths = [path for path in PACKAGE.rglob("*.py") if "test" not in path.relative_to(PACKAGE).parts]
    used = variables_used([path.read_text(encoding="utf-8") for path in paths])
    assert sorted(set(Envs.declared()) - used) == []


def test_a_planted_variable_that_nobody_looks_up_is_noticed():
    used = variables_used(["x = envs.READ.get()  # IDLE", 'y = child_environment(PASSED="1", z="IDLE")'])
    assert {"READ", "PASSED", "IDLE"} - used == {"IDLE"}

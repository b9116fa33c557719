"""Where drafts run: every forward inside a draft's scope, every scope with its keyword, one list of sites."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import ast
import pathlib
from collections.abc import Iterator

import pytest

import sglang.srt
from sglang.srt.speculative import algorithms

SRT = pathlib.Path(sglang.srt.__path__[0])
ALGORITHMS = pathlib.Path(algorithms.__path__[0])
SCOPE, PIPELINE = "draft_tp_context", "draft_pp_context"
#: What makes or runs a draft's model; `DraftRunner` itself and what it is made of stand below the algorithms.
DRAFT_CALLS = frozenset(
    {"DraftRunner", "init_attention_backend", "prompts", "run", "grow_trees", "idle", "record"}
)

PHASES = {"_read", "propose", "after_accepted", "idle_prompts", "idle_propose", "idle_accepted"}
#: (drafter, method) of every site; those of construction and of back ends are inside the pipeline scope too.
SITES = {
    **{(drafter, phase): False for drafter in ("EagleDrafter", "StandaloneDrafter") for phase in PHASES},
    **{
        (drafter, phase): True
        for drafter in ("EagleDrafter", "StandaloneDrafter")
        for phase in ("__init__", "init_pools", "init_graphs")
    },
}


def opened(node: ast.With) -> list[ast.Call]:
    """The calls that a `with` enters."""
    return [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]


def name_of(call: ast.Call) -> str:
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def sites(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """(class, method, inside the pipeline scope) of every entry into a draft's scope."""
    for made in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (node for node in made.body if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(method):
                if isinstance(node, ast.With) and SCOPE in map(name_of, opened(node)):
                    yield made.name, method.name, PIPELINE in map(name_of, opened(node))


def problems(tree: ast.AST, scopes: int = 0) -> Iterator[str]:
    """Draft calls outside of a scope, scopes in a scope, scopes without the keyword."""
    if isinstance(tree, ast.Call):
        name = name_of(tree)
        if name == SCOPE and [keyword.arg for keyword in tree.keywords] != ["owns_attention"]:
            yield f"line {tree.lineno}: {SCOPE} without owns_attention="
        if name in DRAFT_CALLS and not scopes:
            yield f"line {tree.lineno}: {name} outside of a draft's scope"
    if isinstance(tree, ast.With) and SCOPE in map(name_of, opened(tree)):
        if scopes:
            yield f"line {tree.lineno}: a scope inside a scope"
        for item in tree.items:
            yield from problems(item, scopes)
        for statement in tree.body:
            yield from problems(statement, scopes + 1)
        return
    for child in ast.iter_child_nodes(tree):
        yield from problems(child, scopes)


def parsed(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_the_sites_of_all_drafters_are_those_of_the_list() -> None:
    found = [site for file in sorted(ALGORITHMS.glob("*.py")) for site in sites(parsed(file))]
    assert {(drafter, method): pipeline for drafter, method, pipeline in found} == SITES
    assert len(found) == len(SITES), "a method enters its scope twice"


def test_no_draft_runs_outside_of_its_scope() -> None:
    for file in sorted(ALGORITHMS.glob("*.py")):
        assert list(problems(parsed(file))) == [], file.name


def test_nobody_but_the_drafters_enters_a_drafts_scope() -> None:
    """All target-side work, acceptance and its broadcast included, is done in the target's placement."""
    entering = {
        file.relative_to(SRT).as_posix()
        for file in SRT.rglob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and name_of(node) in (SCOPE, PIPELINE)
    }
    assert entering == {f"speculative/algorithms/{name}.py" for name in ("eagle", "standalone")}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("self._draft.run(0, batch)", "run outside"),
        (
            "with draft_tp_context(self.owns_attention):\n    self._draft.idle(step)",
            "without owns_attention=",
        ),
        (
            "with draft_tp_context(owns_attention=self.owns_attention):\n"
            "    with draft_tp_context(owns_attention=False):\n"
            "        self._draft.idle(step)",
            "a scope inside a scope",
        ),
        (
            "with draft_tp_context(owns_attention=True):\n    pass\nself._levels.run(work)",
            "run outside",
        ),
        ("with draft_pp_context():\n    self._draft = DraftRunner(load)", "DraftRunner outside"),
    ],
)
def test_the_census_notices(source: str, problem: str) -> None:
    (found,) = problems(ast.parse(source))
    assert problem in found


def test_the_census_sees_a_site_that_is_missing_or_new() -> None:
    class_of = (
        "class EagleDrafter:\n    def {}(self):\n        with draft_tp_context(owns_attention=True): pass"
    )
    assert list(sites(ast.parse(class_of.format("propose")))) == [("EagleDrafter", "propose", False)]
    assert ("EagleDrafter", "update_weights") not in SITES

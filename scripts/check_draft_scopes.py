"""Owns one rule: a draft's tensor scope is entered with `owns_attention=` by keyword.

Run by `make lint`, pre-commit and its own test, over the five trees that can enter the scope. Only the worker
knows the answer, and a missing keyword would fail no earlier than when a draft model runs.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from source_tree import FIVE_TREES, ROOT, dotted, read_sources, report, unparsed

SCOPES = frozenset({"draft_tp_context", "patch_tensor_parallel_group"})
KEYWORD = "owns_attention"


def _called(node: ast.Call) -> str | None:
    """The last name of what is called; `functools.partial(scope, ...)` counts as a call of the scope."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func) or ""
    if called == "partial" and node.args:
        called = (dotted(node.args[0]) or "").rpartition(".")[2]
    return called if called in SCOPES else None


def find_offenders(root: Path) -> list[str]:
    sources = read_sources(root, FIVE_TREES)
    offenders = unparsed(sources)
    offenders += [
        f"{tree}: holds no Python file, this check would not reach it" for tree in _empty_trees(root)
    ]
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            scope = _called(node)
            if scope and not any(keyword.arg == KEYWORD for keyword in node.keywords):
                offenders.append(f"{source.at(node)}: {scope} without {KEYWORD}=; say it by keyword")
    return offenders


def _empty_trees(root: Path) -> list[str]:
    return [tree for tree in FIVE_TREES if not any((root / tree).rglob("*.py"))]


def main() -> int:
    return report("draft scopes", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

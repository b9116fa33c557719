"""Owns one rule: no test sleeps for a fixed time. It waits for what it needs, with the one helper for that.

Run by `make lint`, pre-commit and its own test, over the tests and what they share. A time that is enough on
one machine is too short on another, and a test that only sleeps before it finds nothing wrong proves nothing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from source_tree import ROOT, full_name, imported_names, read_sources, report, unparsed

TREES = ("test", "sgl-kernel/tests", "python/sglang/test")
#: The one place that sleeps.
HELPER = "python/sglang/test/waiting.py"
SLEEPS = frozenset({"time.sleep", "asyncio.sleep"})
CURE = "wait for what has to come with wait_until or until of sglang.test.waiting"


def _yields_only(node: ast.Call) -> bool:
    """`sleep(0)` only lets other tasks run."""
    return len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0


def find_offenders(root: Path) -> list[str]:
    sources = read_sources(root, TREES)
    offenders = unparsed(sources)
    for source in sources:
        names = imported_names(source.tree)
        for node in ast.walk(source.tree):
            if source.name == HELPER or not isinstance(node, ast.Call) or _yields_only(node):
                continue
            called = full_name(node.func, names)
            if called in SLEEPS:
                offenders.append(f"{source.at(node)}: {called}; {CURE}")
    return offenders


def main() -> int:
    return report("sleeping tests", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

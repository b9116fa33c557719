"""Owns one rule: the process environment is touched in `srt/environ.py` and nowhere else in the package.

Run by `make lint`, pre-commit and its own test. Test helpers are exempt: they make the environments of the
servers that they start.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from source_tree import PACKAGE, ROOT, Source, full_name, imported_names, read_sources, report, unparsed

TREES = (PACKAGE, "sgl-kernel/python")
ALLOWED_FILE = f"{PACKAGE}/srt/environ.py"
ALLOWED_FOLDER = f"{PACKAGE}/test/"
FORBIDDEN = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"})


def _touches(source: Source) -> list[str]:
    names = imported_names(source.tree)
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            touched = [f"os.{alias.name}" for alias in node.names if f"os.{alias.name}" in FORBIDDEN]
        elif isinstance(node, ast.Attribute):
            touched = [name for name in [full_name(node, names)] if name in FORBIDDEN]
        else:
            continue
        found += [
            f"{source.at(node)}: touches {name}; declare the variable in srt/environ.py" for name in touched
        ]
    return found


def find_offenders(root: Path) -> list[str]:
    sources = read_sources(root, TREES)
    offenders = unparsed(sources)
    for source in sources:
        if source.name != ALLOWED_FILE and not source.name.startswith(ALLOWED_FOLDER):
            offenders += _touches(source)
    return offenders


def main() -> int:
    return report("environment reads", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

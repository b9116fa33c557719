"""Owns how the checks see the repository: which trees there are, and every file read and parsed once.

Read by the `check_*.py` scripts beside it and by their tests, which pass a planted tree. It must not know any
rule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "python/sglang"
# The trees whose Python can enter the package: the package itself and what calls it from outside.
FIVE_TREES = (PACKAGE, "benchmark", "examples", "scripts", "test")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", ".venv"})


@dataclass(frozen=True)
class Source:
    """One Python file; `name` is its path from the root, `tree` is empty when it does not parse."""

    path: Path
    name: str
    text: str
    tree: ast.Module
    syntax_error: str | None = None

    def at(self, node: ast.AST) -> str:
        """`path:line` of a node, as every check reports it."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"


def files_under(root: Path, trees: Iterable[str], suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    """Every file with one of the suffixes, in a stable order; build output and caches are left out."""
    for tree in trees:
        for path in sorted((root / tree).rglob("*")):
            inside = path.relative_to(root).parts
            if path.suffix in suffixes and path.is_file() and not _SKIPPED_FOLDERS.intersection(inside):
                yield path


def read_sources(root: Path, trees: Iterable[str] = (PACKAGE,)) -> list[Source]:
    """Every Python file of the trees; one that does not parse is kept, so that a check can report it."""
    sources = []
    for path in files_under(root, trees):
        text = path.read_text(encoding="utf-8-sig")
        name = path.relative_to(root).as_posix()
        try:
            sources.append(Source(path, name, text, ast.parse(text)))
        except SyntaxError as error:
            empty = ast.Module(body=[], type_ignores=[])
            sources.append(
                Source(path, name, text, empty, f"{name}:{error.lineno}: does not parse: {error.msg}")
            )
    return sources


def unparsed(sources: Iterable[Source]) -> list[str]:
    """The files that do not parse: no check can look into them, so each check reports them."""
    return [source.syntax_error for source in sources if source.syntax_error]


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of names and attributes, None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Imported name -> what it stands for: `os` for `import os as o`, `a.b` for `from a import b as c`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    first = alias.name.partition(".")[0]
                    names[first] = first
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name of an expression with its first part replaced by what was imported under it."""
    spelled = dotted(node)
    if spelled is None:
        return None
    first, _, rest = spelled.partition(".")
    origin = names.get(first, first)
    return f"{origin}.{rest}" if rest else origin


def report(rule: str, offenders: list[str]) -> int:
    """Print what a check found; returns the exit status of its script."""
    if not offenders:
        print(f"{rule}: ok")
        return 0
    print(f"{rule}: {len(offenders)} offender(s)", file=sys.stderr)
    for offender in offenders:
        print(f"  {offender}", file=sys.stderr)
    return 1

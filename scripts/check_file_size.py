"""Owns the size limits: a file, a class and a function fit their caps, or are listed with a reason.

Run by `make lint`, pre-commit and its own test. The exceptions stand in `file_size_exceptions.toml`, each
with a cap of its own; one that is no longer needed fails the check.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source_tree import FIVE_TREES, ROOT, Source, files_under, read_sources, report, unparsed

EXCEPTIONS_FILE = Path(__file__).with_name("file_size_exceptions.toml")
FILE_CAP, CLASS_CAP, FUNCTION_CAP, CPP_FILE_CAP = 600, 300, 80, 500
PYTHON_TREES = (*FIVE_TREES, "sgl-kernel")
CPP_SUFFIXES = (".cpp", ".h", ".cc", ".cu", ".cuh")


@dataclass(frozen=True)
class Subject:
    """Something with a length: `name` is the path, followed by `::Class.function` for a part of it."""

    name: str
    kind: str
    lines: int
    cap: int


def load_exceptions(path: Path = EXCEPTIONS_FILE) -> dict[str, tuple[int, str]]:
    """Name -> (cap, reason)."""
    if not path.exists():
        return {}
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {entry["name"]: (entry["cap"], entry["reason"]) for entry in table.get("exception", [])}


def _parts(source: Source, node: ast.AST, prefix: str = "") -> Iterator[Subject]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_class = isinstance(child, ast.ClassDef)
            title = f"{prefix}{child.name}"
            lines = (child.end_lineno or child.lineno) - child.lineno + 1
            kind, cap = ("class", CLASS_CAP) if is_class else ("function", FUNCTION_CAP)
            yield Subject(f"{source.name}::{title}", kind, lines, cap)
            yield from _parts(source, child, f"{title}.")
        else:
            yield from _parts(source, child, prefix)


def subjects(root: Path) -> Iterator[Subject]:
    """Every file, class and function that has a cap."""
    for source in read_sources(root, PYTHON_TREES):
        yield Subject(source.name, "file", source.text.count("\n"), FILE_CAP)
        yield from _parts(source, source.tree)
    for path in files_under(root, ["sgl-kernel"], CPP_SUFFIXES):
        lines = path.read_text(encoding="utf-8").count("\n")
        yield Subject(path.relative_to(root).as_posix(), "C++ file", lines, CPP_FILE_CAP)


def find_offenders(root: Path, exceptions: dict[str, tuple[int, str]] | None = None) -> list[str]:
    exceptions = load_exceptions() if exceptions is None else exceptions
    offenders = unparsed(read_sources(root, PYTHON_TREES))
    seen: set[str] = set()
    for subject in subjects(root):
        cap, reason = exceptions.get(subject.name, (subject.cap, ""))
        said = f"{subject.name}: {subject.kind} of {subject.lines} lines"
        if subject.name in exceptions:
            seen.add(subject.name)
            if subject.lines <= subject.cap:
                offenders.append(f"{said} fits the common cap of {subject.cap}: delete its exception")
            if len(reason.split()) < 4:
                offenders.append(f"{subject.name}: its exception gives no reason")
        if subject.lines > cap:
            offenders.append(f"{said}, cap {cap}: split it by what its parts decide or hold")
    offenders += [f"{name}: listed as an exception, but not there" for name in exceptions if name not in seen]
    return offenders


def main() -> int:
    return report("file size", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

"""Owns one rule: business code asks `get_parallel()`, not `parallel_state` and not torch for its rank.

Run by `make lint`, pre-commit and its own test. The getters are read from the source of `parallel_state.py`,
so that a new one is covered at once. A call counts bare, renamed or dotted; the bare spelling counts in text,
too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import PACKAGE, ROOT, Source, full_name, imported_names, read_sources, report, unparsed

PARALLEL_STATE = f"{PACKAGE}/srt/distributed/parallel_state.py"
EXEMPT_FOLDERS = (f"{PACKAGE}/srt/distributed/", f"{PACKAGE}/test/")
# Not a question about the topology: it builds the one-member group that a draft's pipeline scope installs.
NOT_TOPOLOGY = frozenset({"get_self_pp_group"})
TORCH_READS = frozenset({"torch.distributed.get_rank", "torch.distributed.get_world_size"})
_HOMES = ("sglang.srt.distributed.parallel_state", "sglang.srt.distributed")


def getters(root: Path) -> frozenset[str]:
    """The names of the top-level `get_*` and `is_*` functions of `parallel_state.py`; never empty."""
    path = root / PARALLEL_STATE
    if not path.exists():
        raise FileNotFoundError(f"{PARALLEL_STATE} is not there: the getters to watch are read from it")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    found = frozenset(name for name in names if name.startswith(("get_", "is_"))) - NOT_TOPOLOGY
    if not found:
        raise ValueError(
            f"{PARALLEL_STATE} defines no top-level get_* or is_*: this check would watch nothing"
        )
    return found


def _textual(source: Source, watched: frozenset[str]) -> Iterator[tuple[int, str]]:
    pattern = re.compile(rf"(?<![.\w])({'|'.join(sorted(watched))})\(")
    for number, line in enumerate(source.text.splitlines(), 1):
        if line.lstrip().startswith(("def ", "#")):
            continue
        for match in pattern.finditer(line):
            yield number, match.group(1)


def _in_code(source: Source, watched: frozenset[str]) -> Iterator[tuple[int, str]]:
    names = imported_names(source.tree)
    forbidden = {f"{home}.{name}" for home in _HOMES for name in watched} | TORCH_READS
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                spelled = f"{node.module}.{alias.name}"
                relative = node.level > 0 and (node.module or "").rpartition(".")[2] in (
                    "parallel_state",
                    "distributed",
                )
                if spelled in forbidden or (relative and alias.name in watched):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute):
            name = full_name(node, names) or ""
            # `parallel_state.x` by whatever way the module came in: argument, attribute, relative import.
            by_module = ".".join(name.split(".")[-2:])
            if name in forbidden or (node.attr in watched and by_module == f"parallel_state.{node.attr}"):
                yield node.lineno, name


def find_offenders(root: Path) -> list[str]:
    watched = getters(root)
    sources = read_sources(root)
    offenders = unparsed(sources)
    for source in sources:
        if source.name.startswith(EXEMPT_FOLDERS):
            continue
        found = sorted({*_textual(source, watched), *_in_code(source, watched)})
        offenders += [
            f"{source.name}:{line}: uses {name}; read it through get_parallel()" for line, name in found
        ]
    return offenders


def main() -> int:
    return report("group getters", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

"""Owns one rule: who leads an attention-TP group and which replica a rank serves is asked, not worked out.

Run by `make lint`, pre-commit and its own test. The context answers (`get_parallel().is_attn_tp_leader`,
`replica_rank`, `num_replicas`, `num_worlds`, `ranks_on_host`), and where it cannot, pure functions of
`widths.py` and `fields/parallel.py`. Only what syntax shows is found: a value that travels through a variable
of another name is not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import FIVE_TREES, PACKAGE, ROOT, Source, read_sources, report, unparsed

#: Earlier spelling -> the one of today.
RENAMED = {
    "draws_here": "get_parallel().is_attn_tp_leader",
    "_leads": "widths.leads_attn_tp",
    "replica_number": "get_parallel().replica_rank",
    "replica_count": "get_parallel().num_replicas",
    "worlds_of": "get_parallel().num_worlds",
    "attention_dp_width": "fields.parallel.attn_dp_size_of",
    "attention_dp_of": "fields.parallel.attn_dp_size_of",
    "requests_of_one_replica": "widths.requests_per_replica",
    "ranks_on_this_host": "get_parallel().ranks_on_host",
}
#: Where the answers are worked out; the lab is the second opinion that they are compared with.
HOMES = frozenset(
    {
        f"{PACKAGE}/srt/arg_groups/fields/parallel.py",
        f"{PACKAGE}/srt/runtime_context/parallel_names.py",
        f"{PACKAGE}/srt/runtime_context/widths.py",
        f"{PACKAGE}/test/lab/arithmetic.py",
    }
)
_SWITCHES = frozenset({"attn_dp_size", "enable_dp_attention"})
_ANSWERS = frozenset({"attn_dp_rank", "attn_dp_size", "dp_rank", "dp_size"})
_LEADER_RANKS = frozenset({"attn_tp_rank", "attn_tp"})


def _term(node: ast.AST) -> str | None:
    """The last name of `x.name`, `name` and `x["name"]`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else None


def _terms(*nodes: ast.AST) -> set[str]:
    return {term for node in nodes for part in ast.walk(node) if (term := _term(part)) is not None}


def _is_number(node: ast.AST, number: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == number


def _names(node: ast.AST) -> Iterator[str]:
    """What a node defines, imports or reads by name."""
    if isinstance(node, (ast.FunctionDef, ast.alias)):
        yield node.name
    elif isinstance(node, (ast.Name, ast.Attribute)):
        yield _term(node) or ""


def _worked_out(node: ast.AST) -> str | None:
    """What to ask in place of an expression that works the answer out; None where it does not."""
    match node:
        case ast.IfExp(test=test, body=body, orelse=other):
            if _terms(test) & _SWITCHES and {_term(body), _term(other)} & _ANSWERS:
                return "get_parallel().num_replicas, num_worlds or replica_rank, or attn_dp_size_of"
        case ast.If(test=test, body=[ast.Return(value=ast.expr() as value)]):
            if _terms(test) & _SWITCHES and _term(value) in _ANSWERS:
                return "get_parallel().num_replicas or replica_rank"
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
            if _term(left) in _LEADER_RANKS and _is_number(right, 0):
                return "get_parallel().is_attn_tp_leader or widths.leads_attn_tp"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            if _term(operand) == "attn_tp_rank":
                return "get_parallel().is_attn_tp_leader"
        case ast.BoolOp(op=ast.Or(), values=[first, last]):
            if _term(first) == "dp_rank" and _is_number(last, 0):
                return "get_parallel().replica_rank"
        case ast.BinOp(op=ast.FloorDiv(), left=left, right=right):
            if _term(left) == "dp_size" and _terms(right) & _SWITCHES:
                return "get_parallel().num_worlds or fields.parallel.num_worlds_of"
    return None


def _offences(source: Source) -> Iterator[str]:
    tests = source.name.startswith("test/")
    for node in ast.walk(source.tree):
        for name in _names(node):
            if name in RENAMED:
                yield f"{source.at(node)}: {name} is called {RENAMED[name]}"
        instead = None if tests or source.name in HOMES else _worked_out(node)
        if instead is not None:
            yield f"{source.at(node)}: works out what the context answers; ask {instead}"


def find_offenders(root: Path) -> list[str]:
    sources = read_sources(root, FIVE_TREES)
    return unparsed(sources) + [offence for source in sources for offence in _offences(source)]


def main() -> int:
    return report("replica spellings", find_offenders(ROOT))


if __name__ == "__main__":
    sys.exit(main())

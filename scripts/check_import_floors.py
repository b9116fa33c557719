"""Owns the import direction: no import from a higher floor, no circle between folders, every module on a
floor.

Run by `make lint`, pre-commit and its own test. The floors and the allowed exceptions are data in
`import_floors.toml`.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from source_tree import PACKAGE, ROOT, Source, dotted, read_sources, report, unparsed

RULES_FILE = Path(__file__).with_name("import_floors.toml")
DOTTED_TABLE = "dotted table"
Rank = tuple[int, int]


@dataclass(frozen=True)
class Import:
    """One import of one of our modules; `target` is None where the name is only known at run time."""

    importer: str
    target: str | None
    inside: str  # dotted name of the enclosing function, "" at module level
    where: str  # path:line


@dataclass(frozen=True)
class Shim:
    importer: str
    inside: str
    imports: str
    reason: str

    def covers(self, found: Import) -> bool:
        if not _within(found.importer, self.importer):
            return False
        if self.inside != "*" and self.inside not in found.inside.split("."):
            return False
        if found.target is None:
            return self.imports == DOTTED_TABLE
        return _within(found.target, self.imports)


@dataclass(frozen=True)
class Apart:
    """Folders that the floors would let import each other, and that must not."""

    importers: list[str]
    imports: str
    reason: str

    def forbids(self, found: Import) -> bool:
        if found.target is None or not _within(found.target, self.imports):
            return False
        return any(_matches(found.importer, importer) for importer in self.importers)


@dataclass(frozen=True)
class OneFolder:
    """A sub-folder that counts as a part of the folder that it lies in, because both import each other."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """The floors as (member, rank, name), the shims, what stays apart all the same and what is one."""

    floors: list[tuple[str, Rank, str]]
    shims: list[Shim] = field(default_factory=list)
    apart: list[Apart] = field(default_factory=list)
    one_folder: list[OneFolder] = field(default_factory=list)

    def floor_of(self, module: str) -> tuple[Rank, str] | None:
        best: tuple[int, Rank, str] | None = None
        for member, rank, name in self.floors:
            if _matches(module, member) and (best is None or len(member) > best[0]):
                best = (len(member), rank, name)
        return best[1:] if best else None


def load_rules(path: Path = RULES_FILE) -> Rules:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    floors = [(m, tuple(f["rank"]), f["name"]) for f in table["floor"] for m in f["members"]]
    shims = [Shim(**shim) for shim in table.get("shim", [])]
    apart = [Apart(**entry) for entry in table.get("apart", [])]
    return Rules(floors, shims, apart, [OneFolder(**entry) for entry in table.get("one_folder", [])])


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _matches(module: str, member: str) -> bool:
    if member.startswith("="):
        return module == member[1:]
    return _within(module, member)


def module_name(source: Source) -> str:
    parts = list(Path(source.name).with_suffix("").parts[1:])  # without the leading `python`
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _ImportFinder(ast.NodeVisitor):
    """Collects the imports of one file with the function they stand in; type-only blocks are skipped."""

    def __init__(self, source: Source, modules: set[str]) -> None:
        self.source = source
        self.modules = modules
        self.name = module_name(source)
        is_package = source.path.name == "__init__.py"
        self.package = self.name if is_package else self.name.rpartition(".")[0]
        self.scope: list[str] = []
        self.importers = {"import_module", "__import__"}  # and what this file calls them
        self.found: list[Import] = []

    def _add(self, node: ast.AST, target: str | None) -> None:
        self.found.append(Import(self.name, target, ".".join(self.scope), self.source.at(node)))

    def _add_named(self, node: ast.AST, target: str) -> None:
        """Names of other packages are none of ours; a module that is not in the tree counts by its spelled
        name.
        """
        if _within(target, "sglang"):
            self._add(node, target)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add_named(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            parts = parts[: len(parts) - node.level + 1]
            base = ".".join([*parts, base] if base else parts)
        for alias in node.names:
            if base == "importlib" and alias.name == "import_module":
                self.importers.add(alias.asname or alias.name)
            named = f"{base}.{alias.name}"
            self._add_named(node, named if named in self.modules else base)

    def visit_If(self, node: ast.If) -> None:
        if dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.orelse:
                self.visit(statement)
            return
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        called = dotted(node.func) or ""
        if called.rpartition(".")[2] in self.importers and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._add_named(node, name.value)
            else:
                self._add(node, None)
        self.generic_visit(node)


def find_imports(sources: Iterable[Source]) -> list[Import]:
    sources = list(sources)
    modules = {module_name(source) for source in sources}
    found: list[Import] = []
    for source in sources:
        finder = _ImportFinder(source, modules)
        finder.visit(source.tree)
        found += finder.found
    return found


def _upward(imports: Iterable[Import], rules: Rules) -> Iterator[str]:
    for found in imports:
        importer = rules.floor_of(found.importer)
        if importer is None or any(shim.covers(found) for shim in rules.shims):
            continue
        if found.target is None:
            if importer[0][0] <= 2:  # higher up, a registry may import its own folder by name
                yield f"{found.where}: {found.importer} imports a name only known at run time: list the shim"
            continue
        target = rules.floor_of(found.target)
        if target is not None and target[0] > importer[0]:
            inside = f" (inside {found.inside})" if found.inside else ""
            yield (
                f"{found.where}: {found.importer} on floor {_spell(importer)} imports {found.target} "
                f"on floor {_spell(target)}{inside}; move the shared word down"
            )


def _kept_apart(imports: Iterable[Import], rules: Rules) -> Iterator[str]:
    for found in imports:
        for apart in rules.apart:
            if apart.forbids(found):
                yield f"{found.where}: {found.importer} imports {found.target}: {apart.reason}"


def _spell(floor: tuple[Rank, str]) -> str:
    (level, order), name = floor
    return f"{level}.{order} {name}" if level == 2 else f"{level} {name}"


def folder_of(module: str, packages: set[str]) -> str:
    """The folder in which a module lives, `srt/layers/moe`; a file beside the folders counts as one of its
    own: `srt/environ`.
    """
    folder = module if module in packages else module.rpartition(".")[0]
    return (
        (module if folder in ("sglang", "sglang.srt") else folder).removeprefix("sglang.").replace(".", "/")
    )


def _folder_graph(
    imports: Iterable[Import], rules: Rules, packages: set[str], *, merged: bool = True
) -> dict[str, dict[str, str]]:
    """folder -> folder it imports -> one place where it does."""
    parents = {entry.folder: entry.folder.rpartition("/")[0] for entry in rules.one_folder if merged}
    graph: dict[str, dict[str, str]] = {}
    for found in imports:
        if found.target is None or any(shim.covers(found) for shim in rules.shims):
            continue
        source, target = (folder_of(name, packages) for name in (found.importer, found.target))
        source, target = parents.get(source, source), parents.get(target, target)
        if source != target and target != "srt":
            graph.setdefault(source, {}).setdefault(target, found.where)
    return graph


def _shortest_circle(graph: dict[str, dict[str, str]], start: str) -> list[str] | None:
    """The shortest way from a folder back to itself, breadth first."""
    paths = [[start]]
    seen = {start}
    while paths:
        longer = []
        for path in paths:
            for following in sorted(graph.get(path[-1], {})):
                if following == start:
                    return path
                if following not in seen:
                    seen.add(following)
                    longer.append([*path, following])
        paths = longer
    return None


def _circles(graph: dict[str, dict[str, str]]) -> Iterator[str]:
    reported: set[frozenset[str]] = set()
    for start in sorted(graph):
        circle = _shortest_circle(graph, start)
        if circle is None or frozenset(circle) in reported:
            continue
        reported.add(frozenset(circle))
        steps = zip(circle, [*circle[1:], circle[0]], strict=True)
        yield "folders import each other in a circle: " + "; ".join(
            f"{one} -> {two} at {graph[one][two]}" for one, two in steps
        )


def find_offenders(root: Path, rules: Rules | None = None) -> list[str]:
    """Everything wrong with the import direction under a root; the rules are those of this repository by
    default.
    """
    rules = rules or load_rules()
    sources = read_sources(root, [PACKAGE])
    imports = find_imports(sources)
    offenders = unparsed(sources)
    for source in sources:
        if rules.floor_of(module_name(source)) is None:
            offenders.append(
                f"{source.name}: {module_name(source)} stands on no floor; add it to {RULES_FILE.name}"
            )
    offenders += _upward(imports, rules)
    offenders += _kept_apart(imports, rules)
    offenders += _circles(_folder_graph(imports, rules, _packages(sources)))
    return offenders


def _packages(sources: Iterable[Source]) -> set[str]:
    return {module_name(source) for source in sources if source.path.name == "__init__.py"}


def idle_exceptions(root: Path, rules: Rules | None = None) -> list[str]:
    """Exceptions that nothing uses or that give no reason: they easily outlive their cause."""
    rules = rules or load_rules()
    sources = read_sources(root, [PACKAGE])
    imports = find_imports(sources)
    apart = _folder_graph(imports, rules, _packages(sources), merged=False)
    offenders = []
    for one in rules.one_folder:
        parent = one.folder.rpartition("/")[0]
        if len(one.reason.split()) < 5:
            offenders.append(f"{RULES_FILE.name}: {one.folder} as a part of {parent} gives no reason")
        if one.folder not in apart.get(parent, {}) or parent not in apart.get(one.folder, {}):
            offenders.append(
                f"{RULES_FILE.name}: {one.folder} and {parent} are no circle; delete the exception"
            )
    for shim in rules.shims:
        title = f"{RULES_FILE.name}: the shim {shim.importer} ({shim.inside}) -> {shim.imports}"
        if len(shim.reason.split()) < 5:
            offenders.append(f"{title} gives no reason")
        if not any(shim.covers(found) for found in imports):
            offenders.append(f"{title} is not needed any more; delete it")
    return offenders


def main() -> int:
    return report("import floors", find_offenders(ROOT) + idle_exceptions(ROOT))


if __name__ == "__main__":
    sys.exit(main())

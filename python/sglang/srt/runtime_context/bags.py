"""Owns the read-only namespaces of the published configuration: `get_schedule()`, `get_exec().kernel` ...

Read everywhere. A bag's leaves are ordinary instance attributes, so a read costs one attribute load and can
be compiled. Must not decide a value: bags hold what resolution decided, and `override` states another for a
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from sglang.srt.arg_groups.fields import DERIVED, LEAVES, NAMESPACES
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context.identities import plain_integer
from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.runtime_context.scopes import Scope, ScopeStack, refuse_copy
from sglang.srt.runtime_context.widths import published_widths

__all__ = ["PARALLEL", "TOP_NAMESPACES", "Bag", "build_bags", "namespace_of", "project"]

#: The namespace that is read through `ParallelContext`, not through a bag.
PARALLEL = "parallel"

#: What `get_<name>()` exists for.
TOP_NAMESPACES: tuple[str, ...] = tuple(dict.fromkeys(path.partition(".")[0] for path in NAMESPACES))


class Bag:
    """One published namespace: leaves and sub-namespaces are attributes, which cannot be assigned."""

    _namespace: str
    _leaves: frozenset[str]
    _scopes: ScopeStack

    def __init__(self, namespace: str, values: Mapping[str, object], parts: Mapping[str, Bag]) -> None:
        self.__dict__.update(_namespace=namespace, _leaves=frozenset(values), **values, **parts)
        self.__dict__["_scopes"] = ScopeStack(f"the published namespace '{namespace}'", self.__dict__)

    def __getattr__(self, name: str) -> Any:
        namespace = self.__dict__.get("_namespace")
        if namespace is None or name.startswith("__"):  # a probe of `copy`, before __init__
            raise AttributeError(name)
        raise AttributeError(f"published namespace '{namespace}' has no '{name}'{_hint(name, self)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"published namespace '{self._namespace}' is read-only: state {name} with "
            f".override({name}=...) for a block or with get_context().override(source, {name}=...)"
        )

    def __repr__(self) -> str:
        leaves = ", ".join(f"{name}={value!r}" for name, value in self.values().items())
        return f"Bag({self._namespace}, {leaves})"

    def __reduce__(self) -> NoReturn:
        top, dot, rest = self._namespace.partition(".")
        refuse_copy(f"the published namespace '{self._namespace}'", f"get_{top}(){dot}{rest}")

    def values(self) -> dict[str, object]:
        """The leaves of this namespace, without its parts."""
        return {name: value for name, value in self.__dict__.items() if name in self._leaves}

    def write(self, name: str, value: object) -> object:
        """Replace one leaf for good and return what it was; refused while an open scope states it."""
        with self._scopes.still():
            if self._scopes.states(name):
                raise RuntimeError(
                    f"{self._namespace}.{name} is stated by an open scope, "
                    "which would drop this write when it closes"
                )
            before = self.__dict__[name]
            self.__dict__[name] = plain_integer(value)
            return before

    def scope_stacks(self) -> Iterator[ScopeStack]:
        """Where scopes of this namespace and of its parts are kept."""
        yield self._scopes
        for part in self.__dict__.values():
            if isinstance(part, Bag):
                yield from part.scope_stacks()

    def override(self, **leaves: object) -> Scope:
        """State leaves of this namespace for the length of a block; all names are checked first."""
        unknown = [name for name in leaves if name not in self._leaves]
        if unknown:
            hints = "".join(_hint(name, self) for name in unknown)
            raise ValueError(f"published namespace '{self._namespace}' has no {', '.join(unknown)}{hints}")
        return Scope(self._scopes, leaves)


def _hint(name: str, bag: Bag) -> str:
    """The end of an error: the namespace that has the name, or similar names in this one."""
    home = namespace_of(name)
    if home is not None and home != bag._namespace:
        top, _, rest = home.partition(".")
        return f"; it is in get_{top}(){'.' + rest if rest else ''}"
    if home is not None:
        return "; the published record does not carry it"
    return nearest(name, bag.__dict__)


def namespace_of(name: str) -> str | None:
    """The dotted namespace of a leaf or derived name; None for a name that is not declared."""
    if name in LEAVES:
        return LEAVES[name].namespace
    return next((path for path, items in DERIVED.items() if name in items), None)


def project(record: object) -> dict[str, dict[str, object]]:
    """Dotted namespace -> its resolved leaves and derived values.

    Any object may be published: leaves that it lacks are absent, and so are the values derived from them.
    """
    leaves: dict[str, Any] = {}
    for name in LEAVES:
        try:
            leaves[name] = plain_integer(resolution_result(record, name))
        except AttributeError:
            continue
    values: dict[str, dict[str, Any]] = {path: {} for path in NAMESPACES}
    for name, value in leaves.items():
        values[LEAVES[name].namespace][name] = value
    for path, items in DERIVED.items():
        for name, derived in items.items():
            if derived.compute is not None and all(needed in leaves for needed in derived.inputs):
                values[path][name] = derived.compute(**{needed: leaves[needed] for needed in derived.inputs})
    values[PARALLEL].update(published_widths(leaves))
    return values


def build_bags(values: Mapping[str, Mapping[str, object]]) -> dict[str, Bag]:
    """The top-level bags with their sub-namespaces, without `parallel`, which the context reads itself."""
    bags: dict[str, Bag] = {}
    for top in TOP_NAMESPACES:
        if top == PARALLEL:
            continue
        parts = {
            path.partition(".")[2]: Bag(path, values[path], {})
            for path in NAMESPACES
            if path.startswith(f"{top}.")
        }
        bags[top] = Bag(top, values.get(top, {}), parts)
    return bags

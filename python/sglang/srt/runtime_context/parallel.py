"""Owns `ParallelContext`: the widths, the ranks and the groups of every kind of parallelism.

Read everywhere through `get_parallel()`. A name is answered by an open scope, else by a stamp, else by the
published configuration, else by the process group. Must not import torch or `distributed`: the getters of
groups are found by dotted name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from sglang.srt.arg_groups.arg_utils import derived_of, leaves_of
from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.runtime_context.identities import GROUP_WIDTHS, plain_integer, validate_parallel
from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.runtime_context.parallel_names import COMPUTED, COUNTS, LIVE_READS, SPAWN_FACTS, ParallelNames
from sglang.srt.runtime_context.scopes import Scope, ScopeStack

__all__ = [
    "GETTER_MODULE",
    "ParallelContext",
    "derived_widths",
    "parallel_config_leaves",
    "parallel_fields",
]

#: Where the getters of live names are, looked up at each read, so that a patched getter is used.
GETTER_MODULE = "sglang.srt.distributed.parallel_state"


class ParallelContext(ParallelNames):
    """Answers the leaves of `Parallel` and the names of `ParallelNames`.

    A read costs one slot and at most three dictionary look-ups, and traces under `fullgraph`.
    """

    __slots__ = (
        "_around_stamp",
        "_config",
        "_layers",
        "_overrides",
        "_passed_checks",
        "_scopes",
        "_stamp",
    )

    #: What is published; None before that.
    _config: dict[str, object] | None
    #: Answers that `override_permanently` or the spawn stated; they go before the published ones.
    _stamp: dict[str, object]
    #: Names that the open scopes state; they go before everything.
    _overrides: dict[str, object]
    #: The open scopes, which write `_overrides`.
    _scopes: ScopeStack
    #: What a read looks into: `_overrides`, then config and stamp merged, made anew when one of them changes.
    #: One slot, because reading a slot costs more in a class with `__getattr__`.
    _layers: tuple[dict[str, object], dict[str, object]]
    #: Scopes that passed the check: stated names -> the live answers that the check used. Emptied with
    #: `_layers`.
    _passed_checks: dict[object, dict[str, object]]
    #: Entered around the write of a stamp, with the act and the names that are written or dropped.
    _around_stamp: Callable[[str, set[str]], AbstractContextManager[None]] | None

    def __init__(
        self, *, around_stamp: Callable[[str, set[str]], AbstractContextManager[None]] | None = None
    ) -> None:
        overrides: dict[str, object] = {}
        for slot, value in (
            ("_overrides", overrides),
            ("_scopes", ScopeStack("get_parallel()", overrides)),
            ("_around_stamp", around_stamp),
        ):
            object.__setattr__(self, slot, value)
        self.put(None, {})

    def put(self, config: dict[str, object] | None, stamp: dict[str, object]) -> None:
        """Replace what is published and stamped; only a publication in force and its undoing call this."""
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_stamp", stamp)
        self._rebuild_layers()

    def _rebuild_layers(self) -> None:
        object.__setattr__(self, "_layers", (self._overrides, {**(self._config or {}), **self._stamp}))
        object.__setattr__(self, "_passed_checks", {})

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name not in _FIELDS:
            raise AttributeError(_has_no(name))
        raise AttributeError(
            f"placement is read-only: state {name} with get_parallel().override({name}=...) for a block or "
            f"with get_parallel().override_permanently({name}=...) for good"
        )

    def override(self, **names: object) -> Scope:
        """State names for a block; all are checked before the first can be read.

        Process-wide, like what they override: scopes close last-in first-out, whoever opened them. The caller
        states every width and rank that follows from a stated one.
        """
        _refuse_unknown(names)
        return Scope(self._scopes, names, self._check_scope)

    def override_permanently(self, **names: object) -> None:
        """Stamp names for the rest of this publication; a later stamp replaces an earlier one.

        `RuntimeError` for a name that an open scope states: the stamp would be hidden, and checked against
        widths that end with the scope.
        """
        _refuse_unknown(names)
        names = _in_plain_integers(names)
        with self._scopes.still():
            hidden = sorted(names.keys() & self._overrides.keys())
            if hidden:
                raise RuntimeError(
                    f"an open parallel scope states {', '.join(hidden)}, so a stamp of it would be hidden "
                    "until the scope closes; stamp it outside"
                )
            stamp = {**self._stamp, **names}
            self._check("stamp", names, stated={}, stamp=stamp)
            if self._overrides:
                self._check("stamp", names, stated=self._overrides, stamp=stamp)
            with self._stamping("stamp", set(names)):
                self._stamp.update(names)

    def clear_stamp(self) -> None:
        """Drop every stamp, those of the spawn bundle included.

        `RuntimeError` inside a scope, which was checked together with them.
        """
        with self.no_scope_open("clear_stamp()"), self._stamping("clear_stamp()", set(self._stamp)):
            self._stamp.clear()

    @contextmanager
    def _stamping(self, act: str, names: set[str]) -> Iterator[None]:
        with nullcontext() if self._around_stamp is None else self._around_stamp(act, names):
            yield
            self._rebuild_layers()

    @contextmanager
    def no_scope_open(self, act: str) -> Iterator[None]:
        """`refuse_open_scope`, and no other thread opens one in this block."""
        with self._scopes.still():
            self.refuse_open_scope(act)
            yield

    def refuse_open_scope(self, act: str) -> None:
        """`RuntimeError` while a scope is open, whose names `act` would take for the deployment's."""
        if self._overrides:
            raise RuntimeError(
                f"{act} inside an open parallel scope, which states {', '.join(sorted(self._overrides))}; "
                "close the scope first"
            )

    def _check_scope(self, names: dict[str, object]) -> None:
        """Check the identities with `names` stated on top of the open scopes.

        Drafts enter the same scope several times a step, so a verdict is kept for as long as publication and
        stamp stand. It holds while the process groups give the answers that it rests on, and only for plain
        values: a tensor may be another number the next time. `names` are in plain integers afterwards.
        """
        stated = {**self._overrides, **names} if self._overrides else names
        groups = _groups_in(names)
        key = _check_key(stated, groups)
        if self._overrides:  # equal values, of which another part is stated by the open scopes
            key += ("inside", *names)
        has_hash = True
        try:
            rests_on = self._passed_checks.get(key)
        except TypeError:  # a stated value without a hash: such a scope is checked each time
            has_hash, rests_on = False, None
        if rests_on is not None and (
            not rests_on or all(_live_answer(self, name) == was for name, was in rests_on.items())
        ):
            return
        may_be_kept = has_hash and _may_be_kept(stated, groups) and _ASKED_ANEW.isdisjoint(names)
        names.update(_in_plain_integers(names))
        candidate = self._check("override", names, stated={**self._overrides, **names}, stamp=self._stamp)
        if may_be_kept:
            if len(self._passed_checks) >= _MAX_PASSED_CHECKS:
                self._passed_checks.clear()
            self._passed_checks[key] = {
                name: _live_answer(self, name) for name in LIVE_RANKS if candidate.answered_by(name) == "live"
            }

    def _check(
        self, who: str, names: dict[str, object], *, stated: dict[str, object], stamp: dict[str, object]
    ) -> ParallelContext:
        candidate = ParallelContext()
        candidate._overrides.update(stated)
        candidate.put(self._config, stamp)
        validate_parallel(candidate, who, groups=_groups_in(names), stated=names)
        return candidate

    def __copy__(self) -> ParallelContext:
        """A detached copy: what is stated on it changes nothing here."""
        twin = ParallelContext()
        twin._overrides.update(self._overrides)
        twin.put(None if self._config is None else dict(self._config), dict(self._stamp))
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError("placement belongs to its process; publish() the record there and ask get_parallel()")

    def outside_scopes(self) -> Mapping[str, object]:
        """What is published and stamped, by name: the answers outside of any scope."""
        return self._layers[1]

    def answered_by(self, name: str) -> str:
        """What answers `name` now: scope, stamp, published, live, computed or nobody."""
        if name in self._overrides:
            return "scope"
        if name in self._stamp:
            return "stamp"
        if self._config is not None and name in self._config:
            return "published"
        if name in LIVE_READS:
            return "live"
        return "computed" if name in COMPUTED else "nobody"

    def readable_now(self, name: str) -> bool:
        """False where a read could only fail, or would load torch to find out that no group was built."""
        layer = self.answered_by(name)
        return layer != "nobody" and (layer != "live" or GETTER_MODULE in sys.modules)

    if not TYPE_CHECKING:  # or every misspelt name would pass the type checker

        def __getattr__(self, name: str) -> NoReturn:
            # Called only when no slot and no property answered, so it always raises. Underscore names first:
            # `copy` and `pickle` probe for them on instances whose slots are not set yet.
            if name.startswith("_"):
                raise AttributeError(f"ParallelContext has no '{name}'")
            if name in _FIELDS:
                raise AttributeError(
                    f"this ParallelContext was never initialised, so it cannot answer '{name}'"
                )
            raise AttributeError(_has_no(name))


#: Passed checks that are remembered; a process enters a handful of different scopes.
_MAX_PASSED_CHECKS = 64

#: Live names whose answer an identity may rest on.
LIVE_RANKS = tuple(name for name in LIVE_READS if not name.endswith("_group"))


#: Names that are compared with the world group, which no verdict rests on.
_ASKED_ANEW = frozenset({"launch_world_rank", "world_group"})

#: Types whose values stay what they are.
_PLAIN = (bool, float, int, str, type(None))


def _in_plain_integers(names: dict[str, object]) -> dict[str, object]:
    return {name: value if name.endswith("_group") else plain_integer(value) for name, value in names.items()}


def _may_be_kept(stated: dict[str, object], groups: list[str]) -> bool:
    """Whether equal values are certain to pass the check again: nothing here can change in place.

    A group counts by its identity and by its shape.
    """
    parts = [value for name, value in stated.items() if not name.endswith("_group")]
    for name in groups:
        parts += [getattr(stated[name], part, None) for part in ("world_size", "rank_in_group")]
    return all(type(part) in _PLAIN for part in parts)


def _groups_in(names: dict[str, object]) -> list[str]:
    return [name for name in GROUP_WIDTHS if name in names]


def _check_key(stated: dict[str, object], groups: list[str]) -> tuple[object, ...]:
    """What a check depends on beside config, stamp and live ranks: stated values, their types, stated groups.

    Types, because `True == 1` and the identities skip a bool.
    """
    values = stated.values()
    key: list[object] = [*stated, *values, *map(type, values)]
    for name in groups:
        group = stated[name]
        if group is not None:
            key += [getattr(group, "world_size", None), getattr(group, "rank_in_group", None)]
    return tuple(key)


def _live_answer(parallel: ParallelContext, name: str) -> object:
    """The rank or width that the process group answers; None without a group."""
    if not parallel.readable_now(name):
        return None
    try:
        return plain_integer(getattr(parallel, name))
    except Exception:  # noqa: BLE001 - as in the identities: whatever fails is unreadable
        return None


def _has_no(name: str) -> str:
    return f"ParallelContext has no '{name}'{nearest(name, sorted(_FIELDS))}"


def _refuse_unknown(names: dict[str, object]) -> None:
    if names.keys() <= _FIELDS:
        return
    unknown = sorted(names.keys() - _FIELDS)
    raise ValueError(
        f"unknown parallel field{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}"
        f"{nearest(unknown[0], sorted(_FIELDS))}"
    )


def _reader(name: str, otherwise: Callable[[ParallelContext], object], doc: str) -> property:
    """A property for `name`, a closure variable that dynamo treats as a constant."""

    def read(self: ParallelContext) -> object:
        overrides, settled = self._layers
        if name in overrides:
            return overrides[name]
        if name in settled:
            return settled[name]
        return otherwise(self)

    return property(read, doc=doc)


def _leaf(name: str) -> property:
    def missing(self: ParallelContext) -> NoReturn:
        if self._config is not None:
            raise ValueError(
                f"the published record has no '{name}', so get_parallel() cannot answer it; state it with "
                f"get_parallel().override({name}=...)"
            )
        raise ValueError(
            f"config namespace 'parallel' not published: cannot answer '{name}'. The process entry calls "
            f"publish(); a block without one states it with get_parallel().override({name}=...)"
        )

    return _reader(name, missing, f"`{name}` of the published configuration")


def _derived(name: str) -> property:
    def missing(self: ParallelContext) -> NoReturn:
        raise RuntimeError(
            f"derived parallel width '{name}' is not available: publish() computes it from the leaves, "
            f"get_parallel().override({name}=...) states it for a block, override_permanently() for good"
        )

    return _reader(name, missing, f"`{name}`, computed from the leaves at publish")


def _live(name: str, getter: str) -> property:
    def ask_group(self: ParallelContext) -> object:
        module = sys.modules.get(GETTER_MODULE) or import_module(GETTER_MODULE)
        try:
            return getattr(module, getter)()
        except AttributeError as error:
            # From a property it would make Python call __getattr__, which would deny that the name exists.
            raise RuntimeError(f"the process group could not answer '{name}': {error}") from error

    return _reader(name, ask_group, f"`{name}`, asked of the process group unless stated or stamped")


def _spawn_fact(name: str) -> property:
    def missing(self: ParallelContext) -> NoReturn:
        raise RuntimeError(SPAWN_FACTS[name])

    return _reader(name, missing, f"`{name}`, a fact of the spawn")


def parallel_config_leaves() -> set[str]:
    """Names that an operator can set."""
    return set(leaves_of(Parallel))


def derived_widths() -> tuple[str, ...]:
    """Names of the widths that follow from the leaves."""
    return tuple(derived_of(Parallel))


def parallel_fields() -> set[str]:
    """Every name that can be read and stated."""
    return set(_FIELDS)


def _install_readers() -> frozenset[str]:
    readers = {name: _leaf(name) for name in leaves_of(Parallel)}
    tables: list[dict[str, property]] = [
        {name: _derived(name) for name in (*derived_of(Parallel), *COUNTS)},
        {name: _live(name, getter) for name, getter in LIVE_READS.items()},
        {name: _spawn_fact(name) for name in SPAWN_FACTS},
        {name: _reader(name, rule, rule.__doc__ or "") for name, rule in COMPUTED.items()},
    ]
    for table in tables:
        twice = sorted(set(readers) & set(table))
        if twice:
            raise AssertionError(f"declared twice for the parallel context: {', '.join(twice)}")
        readers.update(table)
    for name, reader in readers.items():
        setattr(ParallelContext, name, reader)
    return frozenset(readers)


_FIELDS = _install_readers()

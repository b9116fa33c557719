"""Owns how a scope opens and closes: values that names of a dictionary have for the length of a block.

Used by the parallel context, the bags and the flags, which check what may be stated. Must not know what the
names mean.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import NoReturn, ParamSpec

__all__ = ["Scope", "ScopeStack", "refuse_copy", "scope_function"]

P = ParamSpec("P")


class ScopeStack:
    """The open scopes over one dictionary of values, in the order in which they were opened.

    The values are process-wide, so the scopes of all threads and tasks are on one stack and close last-in
    first-out, whoever opened them. A scope that closes in another order raises `RuntimeError`; its names are
    taken back all the same, and the scopes that are still open keep theirs.
    """

    __slots__ = ("_lock", "_open", "_values", "place")

    def __init__(self, place: str, values: dict[str, object]) -> None:
        self.place = place
        self._values = values
        self._open: list[Scope] = []
        self._lock = threading.RLock()  # a check reads through getters, which may open a scope themselves

    def states(self, name: str) -> bool:
        """Whether an open scope states the name."""
        return any(name in scope.names for scope in self._open)

    @contextmanager
    def closed(self, act: str) -> Iterator[None]:
        """Keep scopes from being opened in this block; `RuntimeError` where one is open.

        An open scope would take back what `act` writes, or hide it.
        """
        with self._lock:
            stated = sorted({name for scope in self._open for name in scope.names})
            if stated:
                raise RuntimeError(
                    f"{act} inside an open scope of {self.place}, which states {', '.join(stated)}; close "
                    "the scope first"
                )
            yield

    @contextmanager
    def still(self) -> Iterator[None]:
        """No other thread opens or closes a scope in this block."""
        with self._lock:
            yield

    def open(self, scope: Scope, check: Callable[[dict[str, object]], None] | None) -> None:
        """Check and state the names; no other thread states one in between."""
        with self._lock:
            if check is not None:
                check(scope.names)
            scope.before = _replace(self._values, scope.names)
            self._open.append(scope)

    def close(self, scope: Scope) -> None:
        with self._lock:
            if self._open and self._open[-1] is scope:
                self._open.pop()
                _put_back(self._values, scope)
                return
            if scope not in self._open:
                raise RuntimeError(
                    f"{self.place}: the scope that states {scope.described()} closes and is not open: it was "
                    "closed before, or never entered; write `with ...:`, which enters and closes it once"
                )
            later = self._take_out(scope)
        raise RuntimeError(
            f"{self.place}: the scope that states {scope.described()} closes before the scope opened after "
            f"it, which states {later.described()}. Scopes close last-in first-out, in whatever threads or "
            "tasks they were opened; the names of the closed one are taken back, the other stays open"
        )

    def _take_out(self, scope: Scope) -> Scope:
        """Remove a scope from below others and return the one above it.

        Works on a copy of the values, so that a name which stays stated is never missing in between.
        """
        at = self._open.index(scope)
        values = dict(self._values)
        for closing in reversed(self._open[at:]):
            _put_back(values, closing)
        del self._open[at]
        for staying in self._open[at:]:
            staying.before = _replace(values, staying.names)
        self._values.update(values)
        for name in self._values.keys() - values.keys():
            del self._values[name]
        return self._open[at]


class Scope:
    """One block: `with` states the names and takes them back.

    A scope is entered once. Dropping it without entering warns, since it stated nothing.
    """

    __slots__ = ("_check", "_entered", "_opened_at", "_stack", "before", "names")

    #: Values of the names before the scope opened; a name that is missing had none.
    before: dict[str, object]

    def __init__(
        self,
        stack: ScopeStack,
        names: dict[str, object],
        check: Callable[[dict[str, object]], None] | None = None,
    ) -> None:
        self._entered = False
        self._stack = stack
        self._check = check
        self._opened_at: tuple[str, int] | None = None
        self.names = names

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(f"the scope that states {self.described()} was entered before; make another")
        self._entered = True
        caller = sys._getframe(1)
        self._opened_at = (caller.f_code.co_filename, caller.f_lineno)
        self._stack.open(self, self._check)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close(self)

    def __del__(self) -> None:
        if not self._entered:
            _warn_never_entered(f"a scope of {self._stack.place} that states {self.described()}")

    def described(self) -> str:
        """The names, and the line that opened the scope."""
        listed = ", ".join(sorted(self.names)) or "nothing"
        return (
            listed
            if self._opened_at is None
            else f"{listed} (opened at {':'.join(map(str, self._opened_at))})"
        )


def scope_function(
    function: Callable[P, Iterator[None]],
) -> Callable[P, AbstractContextManager[None]]:
    """`contextmanager` for a function that opens scopes; its result warns too when it is never entered."""
    make = contextmanager(function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return _Block(function.__qualname__, make(*args, **kwargs))

    return made


class _Block:
    __slots__ = ("_entered", "_manager", "_name", "_open")

    def __init__(self, name: str, manager: AbstractContextManager[None]) -> None:
        self._entered = self._open = False
        self._name = name
        self._manager = manager

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(f"{self._name}(...) was entered before; make another")
        self._entered = True
        self._manager.__enter__()
        self._open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if not self._open:  # the generator would run its body now, and state what nobody closes
            raise RuntimeError(
                f"{self._name}(...) closes and is not open: it was closed before, or never entered; write "
                "`with ...:`, which enters and closes it once"
            )
        self._open = False
        return self._manager.__exit__(kind, error, trace)

    def __del__(self) -> None:
        if not self._entered:
            _warn_never_entered(f"{self._name}(...)")


def _warn_never_entered(what: str) -> None:
    warnings.warn(
        f"{what} was made and never entered, so it stated nothing: write `with ...:`",
        RuntimeWarning,
        stacklevel=3,
    )


def refuse_copy(what: str, accessor: str) -> NoReturn:
    """TypeError for `copy` and `pickle`: the copy would hold the scopes of the original, and write there."""
    raise TypeError(
        f"{what} belongs to its process and is not copied or pickled: a copy would write into the original. "
        f"Ask {accessor} wherever it is needed; another process publishes the record and asks its own"
    )


def _replace(values: dict[str, object], names: dict[str, object]) -> dict[str, object]:
    before = {name: values[name] for name in names if name in values}
    values.update(names)
    return before


def _put_back(values: dict[str, object], scope: Scope) -> None:
    before, names = scope.before, scope.names
    if not before and len(values) == len(names):  # the outermost scope of a place that holds nothing else
        values.clear()
        return
    values.update(before)
    if len(before) < len(names):
        for name in names.keys() - before.keys():
            values.pop(name, None)

"""Owns `RuntimeContext`, the one process-wide object, and the functions that read its parts.

Read everywhere through `get_context()`, `get_parallel()`, `get_schedule()` and so on. Must not import torch,
`distributed` or anything under `srt/utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sglang.srt.arg_groups.fields import DERIVED, LEAVES
from sglang.srt.platforms.device import make_stream
from sglang.srt.runtime_context.bags import PARALLEL, Bag, namespace_of
from sglang.srt.runtime_context.flags import Flags
from sglang.srt.runtime_context.forward import ForwardFlags
from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.runtime_context.parallel import ParallelContext
from sglang.srt.runtime_context.publication import (
    OverrideEntry,
    Publication,
    SpawnRanks,
    build_publication,
)
from sglang.srt.runtime_context.resources import Resources
from sglang.srt.runtime_context.scopes import refuse_copy
from sglang.srt.runtime_context.widths import runs_attention_dp

if TYPE_CHECKING:
    import torch

    from sglang.srt.arg_groups.fields.device import Device
    from sglang.srt.arg_groups.fields.disagg import Disagg
    from sglang.srt.arg_groups.fields.exec_ import Exec
    from sglang.srt.arg_groups.fields.lora import Lora
    from sglang.srt.arg_groups.fields.memory import Memory
    from sglang.srt.arg_groups.fields.mm import Mm
    from sglang.srt.arg_groups.fields.model import Model
    from sglang.srt.arg_groups.fields.observability import Observability
    from sglang.srt.arg_groups.fields.schedule import Schedule
    from sglang.srt.arg_groups.fields.serving import Serving
    from sglang.srt.arg_groups.fields.spec import Spec
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "RuntimeContext",
    "get_context",
    "get_device",
    "get_disagg",
    "get_exec",
    "get_flags",
    "get_forward",
    "get_lora",
    "get_memory",
    "get_mm",
    "get_model",
    "get_observability",
    "get_parallel",
    "get_resources",
    "get_schedule",
    "get_server_args",
    "get_serving",
    "get_spec",
]

T = TypeVar("T")

#: By name and only when asked: a scope for tests has no place among what a server imports.
_TEST_SCOPES = "sglang.test.scoped_args"


class RuntimeContext:
    """What is in force in this process: configuration, placement, runtime flags, handles."""

    def __init__(self) -> None:
        self.parallel: ParallelContext = ParallelContext(around_stamp=self._follow_stamp)
        self.flags = Flags()
        self.forward = ForwardFlags()
        self.resources = Resources()
        self.publication: Publication | None = None

    def __reduce__(self) -> NoReturn:
        refuse_copy("RuntimeContext", "get_context()")

    @property
    def _server_args(self) -> object:
        return None if self.publication is None else self.publication.record

    @property
    def server_args(self) -> ServerArgs:
        """The published record as the operator stated it; resolved values are in the namespaces."""
        if self.publication is None:
            raise ValueError("Global server args is not set yet!")
        record: ServerArgs = self.publication.record
        return record

    def set_server_args(self, record: object) -> None:
        """Publish any object without a role and without ranks; leaves that it lacks stay unpublished."""
        self.publish(record, role=None, ranks=None)

    def publish(self, record: object, *, role: str | None, ranks: SpawnRanks | None) -> None:
        """Build and check a publication, then put it in force.

        `RuntimeError` inside a scope of placement, flags or namespaces: its names would answer for a record
        that they were not stated for, or be lost with the old one. No other thread opens a scope meanwhile.
        """
        with self._no_scope_open("publish"):
            self.install(build_publication(record, role=role, ranks=ranks))

    @contextmanager
    def _no_scope_open(self, act: str) -> Iterator[None]:
        # Placement first, as a stamp does: two orders of taking the locks would wait for each other.
        stacks = self.flags.scope_stacks()
        for bag in () if self.publication is None else self.publication.bags.values():
            stacks += bag.scope_stacks()
        with ExitStack() as held:
            held.enter_context(self.parallel.no_scope_open(act))
            for stack in stacks:
                held.enter_context(stack.closed(act))
            yield

    def install(self, publication: Publication | None) -> None:
        """Put a publication (or none) in force; it was checked when it was built."""
        self.publication = publication
        if publication is None:
            self.parallel.put(None, {})
        else:
            self.parallel.put(publication.config, publication.stamp)
            for (group, leaf), value in publication.seeds.items():
                setattr(getattr(self.flags, group), leaf, value)

    @contextmanager
    def _follow_stamp(self, act: str, names: set[str]) -> Iterator[None]:
        """Let `flags.dp.enabled` follow a stamp of the width that it comes from; entered around the write.

        `RuntimeError` inside a scope of these flags, which would take the change back.
        """
        if "attn_dp_size" not in names:
            yield
            return
        with self.flags.dp._scopes.closed(f"{act} of attn_dp_size, which sets get_flags().dp.enabled,"):
            yield
            self.flags.dp.enabled = runs_attention_dp(self.parallel.outside_scopes())

    def namespace(self, name: str) -> Any:
        """One top-level bag of the publication; the getters below say which leaves it has."""
        if self.publication is None:
            raise ValueError(
                f"config namespace '{name}' not published: the process entry calls publish() "
                "before anything reads it"
            )
        return self.publication.bags[name]

    def override(self, source: str, /, **leaves: object) -> None:
        """Replace published leaves for good, by bare name; `source` is logged as the author."""
        if self.publication is None:
            raise ValueError(
                f"nothing is published, so {source!r} has nothing to override; call publish() first"
            )
        homes = {name: _home_of(name) for name in leaves}
        bags = {name: self._bag_at(path) for name, path in homes.items()}
        absent = [name for name, bag in bags.items() if name not in bag._leaves]
        if absent:
            raise ValueError(f"{source}: the published record does not carry {', '.join(absent)}")
        blocked = [name for name, bag in bags.items() if bag._scopes.states(name)]
        if blocked:
            bags[blocked[0]].write(blocked[0], leaves[blocked[0]])  # raises before anything is written
        for name, value in leaves.items():
            before = bags[name].write(name, value)
            after = bags[name].__dict__[name]
            self.publication.log.append(OverrideEntry(source, homes[name], name, before, after))

    def _bag_at(self, path: str) -> Bag:
        top, _, rest = path.partition(".")
        bag: Bag = self.namespace(top)
        return getattr(bag, rest) if rest else bag

    def overrides_log(self) -> tuple[OverrideEntry, ...]:
        """Every override since the last publish, in order."""
        return () if self.publication is None else tuple(self.publication.log)

    def override_server_args(self, **fields: object) -> AbstractContextManager[object]:
        """The scope of a test: a dummy record with these fields decided is published for a block."""
        scope: AbstractContextManager[Any] = import_module(_TEST_SCOPES).ServerArgsOverride(self, fields)
        return scope

    def get_stream(self, name: str) -> torch.Stream:
        """The device stream of that name, made when it is first asked for."""
        streams = self.resources.streams
        if name not in streams:
            streams[name] = make_stream()
        return streams[name]

    def set_stream(self, name: str, stream: torch.Stream) -> None:
        self.resources.streams[name] = stream

    def get_buffer(self, name: str, factory: Callable[[], T]) -> T:
        """The persistent buffer of that name, made by `factory` when it is first asked for."""
        buffers = self.resources.buffers
        if name not in buffers:
            buffers[name] = factory()
        made: T = buffers[name]
        return made

    def reset(self) -> None:
        """Empty the process. The `ParallelContext` stays the same object, because components keep it."""
        if self.parallel._overrides:
            stated = ", ".join(sorted(self.parallel._overrides))
            raise AssertionError(f"reset inside an open parallel scope that states {stated}; close it first")
        self.install(None)
        self.flags = Flags()
        self.forward = ForwardFlags()
        self.resources = Resources()


def _home_of(name: str) -> str:
    home = namespace_of(name)
    if home is None:
        known = [*LEAVES, *(name for names in DERIVED.values() for name in names)]
        raise ValueError(f"no published leaf is called '{name}'{nearest(name, known)}")
    if home == PARALLEL:
        raise ValueError(
            f"'{name}' is placement, which is checked as a whole: use get_parallel().override({name}=...) "
            "for a block or override_permanently() for good"
        )
    return home


_CONTEXT = RuntimeContext()
_PARALLEL = _CONTEXT.parallel


def get_context() -> RuntimeContext:
    return _CONTEXT


def get_parallel() -> ParallelContext:
    """Widths, ranks and groups. May be kept: the object is the same for the life of the process."""
    return _PARALLEL


def get_flags() -> Flags:
    """Runtime flags. Never keep the object: a reset replaces it."""
    return _CONTEXT.flags


def get_forward() -> ForwardFlags:
    """Flags of the running forward. Never keep the object: a reset replaces it."""
    return _CONTEXT.forward


def get_resources() -> Resources:
    return _CONTEXT.resources


def get_server_args() -> ServerArgs:
    """The published record, to be passed on; values are read from the namespaces."""
    return _CONTEXT.server_args


def get_model() -> Model:
    bag: Model = _CONTEXT.namespace("model")
    return bag


def get_serving() -> Serving:
    bag: Serving = _CONTEXT.namespace("serving")
    return bag


def get_schedule() -> Schedule:
    bag: Schedule = _CONTEXT.namespace("schedule")
    return bag


def get_memory() -> Memory:
    bag: Memory = _CONTEXT.namespace("memory")
    return bag


def get_exec() -> Exec:
    bag: Exec = _CONTEXT.namespace("exec")
    return bag


def get_spec() -> Spec:
    bag: Spec = _CONTEXT.namespace("spec")
    return bag


def get_lora() -> Lora:
    bag: Lora = _CONTEXT.namespace("lora")
    return bag


def get_disagg() -> Disagg:
    bag: Disagg = _CONTEXT.namespace("disagg")
    return bag


def get_observability() -> Observability:
    bag: Observability = _CONTEXT.namespace("observability")
    return bag


def get_device() -> Device:
    bag: Device = _CONTEXT.namespace("device")
    return bag


def get_mm() -> Mm:
    bag: Mm = _CONTEXT.namespace("mm")
    return bag

"""Owns the scoped configuration of tests: a dummy record with some fields decided, published for a block.

Read through `get_context().override_server_args(...)` and by `published_topology`. Must not run resolution:
the fields are declared beside the record as they are given.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.arg_groups.overrides import declare
from sglang.srt.runtime_context import RuntimeContext
from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.server_args import ServerArgs

__all__ = ["ContextSnapshot", "ServerArgsOverride"]

#: Who declared the values, in the record's own provenance.
_SOURCE = "override_server_args"

#: Flags that publish seeds, so that a scoped publication has to put back.
_SEEDED = {"capture": ("enable_torch_compile",), "dp": ("enabled",)}


class ContextSnapshot:
    """What publish replaces, as it was: publication, stamps, log and the seeded flags (or all of them)."""

    def __init__(self, context: RuntimeContext, *, all_flags: bool = False) -> None:
        self._context = context
        # Kept as it is: only a publication in force grows, and this one is out of force until it is put back.
        self._publication = context.publication
        self._loose_stamp = dict(context.parallel._stamp)
        self._flags = context.flags.snapshot()
        if not all_flags:
            self._flags = {
                group: {leaf: self._flags[group][leaf] for leaf in leaves}
                for group, leaves in _SEEDED.items()
            }

    def put_back(self) -> None:
        """Restore without checking and without refusing."""
        self._context.install(self._publication)
        if self._publication is None:
            self._context.parallel.put(None, self._loose_stamp)
        self._context.flags.restore(self._flags)


class ServerArgsOverride:
    """`install` publishes, `restore` puts back what was there; as a context manager it gives the record."""

    def __init__(self, context: RuntimeContext, fields: dict[str, Any]) -> None:
        self._context = context
        self._fields = fields
        self._before: ContextSnapshot | None = None

    def install(self) -> ServerArgs:
        """Publish a fresh dummy record with the fields declared beside it, and return it."""
        if self._before is not None:
            raise AssertionError("override_server_args(...) is installed already; restore() it first")
        record = _dummy_record(self._fields)
        before = ContextSnapshot(self._context)
        self._context.publish(record, role="test", ranks=None)
        self._before = before
        return record

    def restore(self) -> None:
        """Put back record, namespaces, role, log, stamps and flags; nothing where nothing is installed."""
        before, self._before = self._before, None
        if before is not None:
            before.put_back()

    def __enter__(self) -> ServerArgs:
        return self.install()

    def __exit__(self, *exc_info: object) -> None:
        self.restore()


def _dummy_record(fields: dict[str, Any]) -> Any:
    """Fields are declared; underscore names that are no fields become raw attributes (seeded caches)."""
    known = ServerArgs.__struct_fields__
    unknown = [name for name in fields if name not in known and not name.startswith("_")]
    if unknown:
        raise ValueError(f"ServerArgs has no field {', '.join(unknown)}{nearest(unknown[0], known)}")
    record: Any = ServerArgs(model_path="dummy")
    declare(record, _SOURCE, **{name: value for name, value in fields.items() if name in known})
    for name, value in fields.items():
        if name not in known:
            msgspec.structs.force_setattr(record, name, value)
    return record

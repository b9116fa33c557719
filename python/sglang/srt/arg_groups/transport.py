"""A record and what was declared beside it, as bytes for a child process.

Packed by the entry points, unpacked by rank processes. Raw attributes that tests seed are not packed, and
neither are secrets: only the server asks for a key, a rank never does.
"""

from typing import TypeVar

import msgspec

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import (
    declare,
    declared_provenance,
    is_resolved,
    mark_resolved,
    record_of,
)

R = TypeVar("R")

_PACKED = [name for name, leaf in LEAVES.items() if not leaf.arg.secret]


def pack_configuration(record: object) -> bytes:
    """The record, its declared results and whether it is resolved, as msgpack."""
    record = record_of(record)
    declared = [
        (item.name, item.value, item.source) for item in declared_provenance(record) if item.name in _PACKED
    ]
    stated = {name: getattr(record, name) for name in _PACKED}
    return msgspec.msgpack.encode({"record": stated, "declared": declared, "resolved": is_resolved(record)})


def unpack_configuration(data: bytes, record_type: type[R]) -> R:
    """The same record with the same results and provenance, but for secrets; nothing is decided again."""
    parsed = msgspec.msgpack.decode(data)
    record = msgspec.convert(parsed["record"], record_type)
    for name, value, source in parsed["declared"]:
        declare(record, source, **{name: msgspec.convert(value, LEAVES[name].type)})
    if parsed["resolved"]:
        mark_resolved(record)
    return record

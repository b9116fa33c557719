"""A record and what was declared beside it, as bytes for a child process.

Read by the doors (pack) and by rank processes (unpack). msgpack only; raw attributes that tests seed do not
travel, and neither do secrets: the server's doors ask for them, a rank never does.
"""

from typing import Any

import msgspec

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import (
    declare,
    declared_provenance,
    is_resolved,
    mark_resolved,
    record_of,
)


def pack_configuration(record: Any) -> bytes:
    record = record_of(record)
    stated = {name: value for name, value in msgspec.structs.asdict(record).items() if not _is_secret(name)}
    log = [
        (item.name, item.value, item.source)
        for item in declared_provenance(record)
        if not _is_secret(item.name)
    ]
    parts = {"record": stated, "declared": log, "resolved": is_resolved(record)}
    return msgspec.msgpack.encode(parts)


def unpack_configuration(data: bytes, record_type: Any) -> Any:
    """The same record with the same results and provenance, but for secrets; nothing is decided again."""
    parsed = msgspec.msgpack.decode(data)
    record = msgspec.convert(parsed["record"], record_type)
    for name, value, source in parsed["declared"]:
        declare(record, source, **{name: msgspec.convert(value, LEAVES[name].type)})
    if parsed["resolved"]:
        mark_resolved(record)
    return record


def _is_secret(name: str) -> bool:
    leaf = LEAVES.get(name)
    return leaf is not None and leaf.arg.secret

"""Owns what a process does with its record: publish it, assert that it is in force, start over.

Called by process entries (`publish`), constructors (`assert_published`) and tests (`reset_context`). Must not
resolve a record, open the model path or refuse a value that is not served: that happened before.
"""

from __future__ import annotations

from sglang.srt.runtime_context.context import get_context
from sglang.srt.runtime_context.publication import SpawnRanks

__all__ = [
    "ROLES",
    "SpawnRanks",
    "assert_published",
    "assert_role",
    "publish",
    "publish_role",
    "reset_context",
]

#: Kinds of process. A role is asserted by constructors and does not restrict what may be read.
ROLES = frozenset({"scheduler", "tokenizer", "detokenizer", "controller", "engine", "test"})


def publish(server_args: object, *, role: str, ranks: SpawnRanks | None = None) -> None:
    """Put a record in force in this process, in place of an earlier one, after checking all of it.

    With `ranks` every rank is stamped, and no group is asked for one; without, ranks are read live.
    """
    if role not in ROLES:
        raise ValueError(f"publish(role={role!r}): a role is one of {', '.join(sorted(ROLES))}")
    get_context().publish(server_args, role=role, ranks=ranks)


def publish_role() -> str | None:
    """The role in force; None where nothing is published, or without a role."""
    publication = get_context().publication
    return None if publication is None else publication.role


def assert_published(server_args: object, *, role: str) -> None:
    """`RuntimeError` unless this very record is in force as `role`; for constructors that are given one."""
    publication = get_context().publication
    cure = f"the process entry calls publish(server_args, role={role!r}) once, before anything is constructed"
    if publication is None:
        raise RuntimeError(f"nothing is published in this process; {cure}")
    if publication.record is not server_args:
        raise RuntimeError(
            f"a different record is published in this process than the one handed over; {cure}"
        )
    if publication.role != role:
        raise RuntimeError(f"the record is published under role {publication.role!r}, not {role!r}; {cure}")


def assert_role(role: str) -> None:
    """`RuntimeError` unless some record is in force as `role`; a test process counts as every role."""
    publication = get_context().publication
    if publication is None or publication.role != "test":
        assert_published(None if publication is None else publication.record, role=role)


def reset_context() -> None:
    """Drop record, role, namespaces, stamps, flags, forward flags, handles and log, as in a fresh process."""
    get_context().reset()

"""Owns what unit tests share: the test case class, and settings that are published for one block.

Read by tests only. It must not start a process or build a group.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.scoped_args import ContextSnapshot


class CustomTestCase(unittest.TestCase):
    """A unittest case whose failures show whole values."""

    maxDiff = None
    longMessage = True


@contextmanager
def published_topology(
    *, ranks: Mapping[str, Any] | None = None, **server_args_fields: Any
) -> Iterator[ServerArgs]:
    """Publish a record with these fields for the length of a block; everything is restored afterwards.

    `ranks` are the fields of `SpawnRanks`; None publishes without a bundle, so that ranks stay live.
    Record fields only (`dp_size=2, enable_dp_attention=True`, not a command-line spelling), and no group
    is built. Scopes opened inside must be closed inside.
    """
    unknown = sorted(set(server_args_fields) - set(ServerArgs.__struct_fields__))
    if unknown:
        raise ValueError(f"published_topology takes fields of the record, and it has no {', '.join(unknown)}")
    record = ServerArgs(**{"model_path": "dummy", **server_args_fields})
    before = ContextSnapshot(get_context(), all_flags=True)
    open_before = dict(get_parallel()._overrides)
    publish(record, role="test", ranks=None if ranks is None else SpawnRanks(**ranks))
    try:
        yield record
        left_open = sorted(set(get_parallel()._overrides) - set(open_before))
        if left_open:
            raise AssertionError(
                f"scopes opened inside a published topology are still open: {', '.join(left_open)}"
            )
    finally:
        before.put_back()

"""Owns the messages that belong to no request: calls of a scheduler, and the start and end of a rank.

Written by the request side and by the ranks. A call and its answer carry the same `call_id`. They must not
act.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: What a rank, or one write to its context, reports of itself; plain values by name.
Report = dict[str, Any]


class FlushCacheReqInput(msgspec.Struct, kw_only=True, tag=True):
    """Drop the prefix cache; refused while requests run or wait."""

    call_id: int


class FlushCacheReqOutput(msgspec.Struct, kw_only=True, tag=True):
    """Whether the cache is empty now; `message` says why not."""

    call_id: int
    success: bool
    message: str = ""
    dp_rank: int = 0


class GetInternalStateReq(msgspec.Struct, kw_only=True, tag=True):
    """Ask for the scheduler's counters."""

    call_id: int


class GetInternalStateReqOutput(msgspec.Struct, kw_only=True, tag=True):
    """Counters of one scheduler, JSON-safe plain values (`internal_states` of /server_info)."""

    call_id: int
    state: Report
    dp_rank: int = 0


class GetPlacementReq(msgspec.Struct, kw_only=True, tag=True):
    """Ask for the live parallel context of every rank behind one leader."""

    call_id: int


class GetPlacementReqOutput(msgspec.Struct, kw_only=True, tag=True):
    """The ranks of one attention-TP group, in its order.

    An entry of `ranks` is `{"world_rank", "dp_rank", "names": {name: [value, layer]}}`; an entry of
    `overrides` is one write to the context after publish, with the `world_rank` it happened on.
    """

    call_id: int
    ranks: list[Report]
    overrides: list[Report]
    dp_rank: int = 0


class DispatchedReq(msgspec.Struct, kw_only=True, tag=True):
    """How many messages each attention-DP replica has been sent so far, this one not counted.

    Only the leader of replica 0 gets it: it waits on its socket when no replica has work, and must not while
    a message is on its way to another one.
    """

    counts: list[int]


class ShutdownReq(msgspec.Struct, kw_only=True, tag=True):
    """Leave the event loop now and drop what still runs; the server drains before it sends this."""


class RankReady(msgspec.Struct, kw_only=True, tag=True):
    """A rank is loaded and its loop is about to start.

    `info` holds `max_total_num_tokens`, `max_req_input_len`, `context_len`, `vocab_size`, `startup_time` and
    what else the server must know.
    """

    world_rank: int
    info: Report


class RankFailed(msgspec.Struct, kw_only=True, tag=True):
    """A rank ends by an error; the traceback is for the server's log.

    `secondary` says that a collective failed: most likely another rank is the cause, and its message counts.
    """

    world_rank: int
    message: str
    traceback: str
    secondary: bool = False

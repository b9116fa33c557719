"""Owns the inbox of the ranks that hold the same requests: the leader's channel, and its copy to every peer.

Read by the scheduler once a turn. It must not look into a message, and it is the only place where a rank
reads a clock that decides something: all ranks of the group work with the leader's time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sglang.srt.messages.io_struct import decode, encode
from sglang.srt.runtime_context import get_parallel

#: First word of what the leader broadcasts here, so that a rank that is elsewhere in its turn notices.
INBOX = "inbox"
#: A leader that rests must be back long before its peers' broadcast runs into `--dist-timeout`.
_TIMEOUT_SHARE = 0.5


class Channel(Protocol):
    """Where requests come from and answers go."""

    def recv_all(self) -> list[Any]: ...

    def wait(self, timeout_s: float) -> Any: ...

    def send(self, message: Any) -> Any: ...


class Inbox(NamedTuple):
    """What a turn starts from, the same on all ranks of the group."""

    now: float
    messages: list[Any]


class GroupChannel:
    """The attention-TP group's end of the wire. `channel` is None on a peer: it hears what the leader hears
    and sends nothing.
    """

    def __init__(self, channel: Channel | None) -> None:
        parallel = get_parallel()
        self._width: int = parallel.attn_tp_size
        self._is_leader = parallel.is_attn_tp_leader
        if (channel is not None) != self._is_leader:
            raise RuntimeError(
                f"attention-TP rank {parallel.attn_tp_rank if self._width > 1 else 0} of {self._width} was "
                f"given {'a' if channel is not None else 'no'} channel: rank 0 of the group needs one, its "
                "peers must have none"
            )
        self._channel = channel
        self._turn = 0
        self._longest_wait = float("inf")
        if parallel.tp_size > 1 and parallel.dist_timeout is not None:
            self._longest_wait = parallel.dist_timeout * _TIMEOUT_SHARE

    @property
    def is_leader(self) -> bool:
        return self._is_leader

    def receive(self) -> Inbox:
        """What arrived since the last turn. A peer waits here for its leader."""
        if self._width == 1:
            assert self._channel is not None
            return Inbox(time.monotonic(), self._channel.recv_all())
        self._turn += 1
        if self._channel is None:
            return self._hear()
        messages = self._channel.recv_all()
        inbox = Inbox(time.monotonic(), messages)
        copy = [INBOX, self._turn, inbox.now, [encode(message) for message in messages]]
        get_parallel().attn_tp_group.broadcast_object(copy, src=0)
        return inbox

    def _hear(self) -> Inbox:
        heard = get_parallel().attn_tp_group.broadcast_object(None, src=0)
        if not isinstance(heard, list) or heard[:2] != [INBOX, self._turn]:
            what = heard[:2] if isinstance(heard, list) else type(heard).__name__
            raise RuntimeError(
                f"rank {get_parallel().attn_tp_rank} of the attention-TP group waits for the messages of "
                f"turn {self._turn}, and its leader sent {what}: the two planned differently in the turn "
                "before"
            )
        _, _, now, messages = heard
        return Inbox(now, [decode(message) for message in messages])

    def rest(self, timeout_s: float) -> None:
        """Wait for something to arrive. A peer does not: it waits in the next turn's broadcast."""
        if self._channel is not None:
            self._channel.wait(min(timeout_s, self._longest_wait))

    def send(self, message: Any) -> None:
        """The leader's word for the whole group."""
        if self._channel is not None:
            self._channel.send(message)

    def require_equal(self, what: str, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that would decide by different numbers (another environment on another host, say)."""
        if self._width == 1:
            return
        tables = get_parallel().attn_tp_group.all_gather_object(dict(facts))
        differing = [name for name in facts if any(table[name] != tables[0][name] for table in tables)]
        if differing:
            shown = "; ".join(f"{name}: {[table[name] for table in tables]}" for name in differing)
            raise RuntimeError(
                f"the {what} differ between the ranks of one attention-TP group ({shown}, in rank order): "
                "start all ranks with the same flags and environment variables"
            )

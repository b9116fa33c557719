"""Owns what an attention-TP group receives: the leader's messages and time, sent to its peers each step.

Read by the scheduler. It must not look into a message. Only here is a clock read that decides something: all
ranks of the group work with the leader's time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from sglang.srt.messages.channel import SchedulerChannel
from sglang.srt.messages.io_struct import Message, decode, encode
from sglang.srt.runtime_context import get_parallel

#: Marks this broadcast, so that a rank that waits for another one notices.
INBOX = "inbox"
#: A step takes in so many requests, some milliseconds of work: streams do not wait for a crowd to be let in.
MOST_MESSAGES = 256
#: An idle leader must be back long before its peers' broadcast runs into `--dist-timeout`.
_TIMEOUT_SHARE = 0.5


class Inbox(NamedTuple):
    """What a step starts from, the same on all ranks of the group."""

    now: float
    messages: list[Message]


class GroupChannel:
    """The channel of a whole attention-TP group. A peer has no `channel` of its own and sends nothing."""

    def __init__(self, channel: SchedulerChannel | None) -> None:
        parallel = get_parallel()
        self._width: int = parallel.attn_tp_size
        self._is_leader = get_parallel().is_attn_tp_leader
        if (channel is not None) != self._is_leader:
            raise RuntimeError(
                f"attention-TP rank {parallel.attn_tp_rank if self._width > 1 else 0} of {self._width} was "
                f"given {'a' if channel is not None else 'no'} channel: rank 0 of the group needs one, its "
                "peers must have none"
            )
        self._channel = channel
        self._step = 0
        self._longest_wait = float("inf")
        if parallel.tp_size > 1 and parallel.dist_timeout is not None:
            self._longest_wait = parallel.dist_timeout * _TIMEOUT_SHARE

    @property
    def is_leader(self) -> bool:
        return self._is_leader

    def receive(self) -> Inbox:
        """What arrived since the last step; of a crowd the first requests. A peer waits for its leader."""
        if self._width == 1:
            assert self._channel is not None
            return Inbox(time.monotonic(), self._channel.recv_all(MOST_MESSAGES))
        self._step += 1
        if self._channel is None:
            return self._receive_from_leader()
        messages = self._channel.recv_all(MOST_MESSAGES)
        inbox = Inbox(time.monotonic(), messages)
        copy = [INBOX, self._step, inbox.now, [encode(message) for message in messages]]
        get_parallel().attn_tp_group.broadcast_object(copy, src=0)
        return inbox

    def _receive_from_leader(self) -> Inbox:
        copy = get_parallel().attn_tp_group.broadcast_object(None, src=0)
        if not isinstance(copy, list) or copy[:2] != [INBOX, self._step]:
            what = copy[:2] if isinstance(copy, list) else type(copy).__name__
            raise RuntimeError(
                f"rank {get_parallel().attn_tp_rank} of the attention-TP group waits for the messages of "
                f"step {self._step}, and its leader sent {what}: the two planned differently in the step "
                "before"
            )
        _, _, now, messages = copy
        return Inbox(now, [decode(message) for message in messages])

    def rest(self, timeout_s: float) -> None:
        """Wait for something to arrive. A peer does not: it waits in the next step's broadcast."""
        if self._channel is not None:
            self._channel.wait(min(timeout_s, self._longest_wait))

    def send(self, message: Message) -> None:
        """The leader answers for the whole group."""
        if self._channel is not None:
            self._channel.send(message)

    def require_equal(self, what: str, facts: Mapping[str, object]) -> None:
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

"""Owns what a channel between the request side and the schedulers offers, at either of its ends.

Read by whoever sends through one; the real ones are in `processes/wire.py`. It must not know how bytes
travel.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.messages.io_struct import Message


class Channel(Protocol):
    """The request side's end, on an event loop."""

    def send(self, message: Message, /) -> None: ...

    async def recv(self) -> Message: ...

    def close(self) -> None: ...


class LeadersChannel(Channel, Protocol):
    """A request side's end with several leaders behind it, of which `send` names one."""

    def send(self, message: Message, leader: int = 0, /) -> None: ...


class SchedulerChannel(Protocol):
    """The scheduler's end, which its loop polls between two steps."""

    def send(self, message: Message, /) -> None: ...

    def recv_all(self, most: int | None = None) -> list[Message]:
        """What has arrived; of a crowd `most` requests, but everything else."""
        ...

    def wait(self, timeout_s: float, /) -> object: ...

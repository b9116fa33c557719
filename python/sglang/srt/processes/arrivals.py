"""Owns what has arrived at a rank and was not handed to its loop yet: requests wait, all else goes past them.

Used by the rank's end of the wire. A crowd is let in over many steps, and a shutdown, an abort or a question
about the rank's state must not stand behind it. It must not open a socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from sglang.srt.messages.io_struct import AbortReq, Message, RequestHead


class Arrivals:
    """Requests that wait, as bytes: of these only the rid was read.

    `decode` and `decode_head` give None for bytes that are to be dropped.
    """

    def __init__(
        self,
        decode: Callable[[bytes], Message | None],
        decode_head: Callable[[bytes], Message | RequestHead | None],
    ) -> None:
        self._decode = decode
        self._decode_head = decode_head
        #: In order of arrival; a list, because nothing here forbids that a rid comes twice.
        self._waiting: dict[str, list[bytes]] = {}

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, received: Iterable[bytes], most: int | None = None) -> list[Message]:
        """The oldest messages, at most so many; behind them whatever has arrived since and is no request.

        An abort brings along the waiting requests that it names, so that they are ended and answered like any
        other. Of those at most `most` and the rest of one abort, then `received` is left for the next call.
        """
        taken = self._oldest(most)
        brought = 0
        for data in received:
            if not self._waiting and (most is None or len(taken) < most):
                message = self._decode(data)
                if message is not None:
                    taken.append(message)
                continue
            head = self._decode_head(data)
            if isinstance(head, RequestHead):
                self._waiting.setdefault(head.rid, []).append(data)
            elif head is not None:
                named = self._named(head)
                taken += [*named, head]
                brought += len(named)
                if most is not None and brought >= most:
                    break
        return taken

    def _oldest(self, most: int | None) -> list[Message]:
        return self._take_out(list(itertools.islice(self._waiting, most)))

    def _named(self, message: Message) -> list[Message]:
        """The waiting requests that an abort names; none for any other message."""
        if not isinstance(message, AbortReq):
            return []
        if message.exact and not message.abort_all:
            return self._take_out([message.rid] if message.rid in self._waiting else [])
        return self._take_out([rid for rid in self._waiting if message.names(rid)])

    def _take_out(self, rids: list[str]) -> list[Message]:
        found = (self._decode(data) for rid in rids for data in self._waiting.pop(rid))
        return [message for message in found if message is not None]

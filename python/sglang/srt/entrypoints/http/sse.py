"""Owns server-sent events as an ASGI answer: `data: {json}` blocks, closed by `data: [DONE]`.

Used by the native and OpenAI routes. A route begins the source of the events before it answers, so that an
early error is still an HTTP error. It must not know what an event means.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.messages.errors import RequestRejected

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events before passing them on breaks streaming
]


def event(value: object) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventSource:
    """The values of a stream's events: those that `write` makes of each item, then those of `finish`.

    Closing it closes `items`, even if nothing has been read; an async generator in its place would not,
    because one that has not begun runs no clean-up.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        write: Callable[[T], Iterable[object]] = lambda item: (item,),
        finish: Callable[[], Iterable[object]] = tuple,
    ) -> None:
        async def read() -> Iterable[object]:
            return write(await anext(items))

        self._read = read
        self._finish = finish
        self._close_items = items.aclose
        self._ready: deque[object] = deque()
        self._ended = False

    async def begin(self) -> None:
        """Work on the first item now, so that its failure is raised here."""
        try:
            await self._read_on()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> EventSource:
        return self

    async def __anext__(self) -> object:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            await self._read_on()
        return self._ready.popleft()

    async def _read_on(self) -> None:
        try:
            self._ready.extend(await self._read())
        except StopAsyncIteration:
            self._ended = True
            self._ready.extend(self._finish())

    async def aclose(self) -> None:
        await self._close_items()


class EventStream(Response):
    """Sends each event of `source` as it comes, and closes it however the stream ends.

    Closing aborts what still runs of the request. `on_error` turns an exception of the source into the last
    event.
    """

    def __init__(self, source: EventSource, *, on_error: Callable[[Exception], object]) -> None:
        super().__init__()
        self._source = source
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for value in self._source:
                await send({"type": "http.response.body", "body": event(value), "more_body": True})
        except Exception as error:
            if not isinstance(error, RequestRejected | ValueError):
                logger.exception("a stream failed")
            last = event(self._on_error(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            await self._source.aclose()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

"""Owns server-sent events as an ASGI answer: `data: {json}` blocks, closed by `data: [DONE]`.

Used by the native and OpenAI routes. The first item is awaited by the route before this begins, so an early
error is still an HTTP error. It must not know what an event means.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.messages.errors import RequestRejected

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events before passing them on breaks streaming
]


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends each item of `events` as it comes; whatever ends it, the source is closed (which aborts the
    request).

    `on_error` turns an exception of the source into the last event.
    """

    def __init__(
        self, events: AsyncIterator[Any], *, on_error: Callable[[Exception], dict[str, Any]]
    ) -> None:
        super().__init__()
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for value in self._events:
                await send({"type": "http.response.body", "body": event(value), "more_body": True})
        except (RequestRejected, ValueError) as error:
            last = event(self._on_error(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        except Exception as error:
            logger.exception("a stream failed")
            last = event(self._on_error(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def first_then(events: AsyncIterator[Any]) -> tuple[bool, AsyncIterator[Any]]:
    """Await the first item, so that what can fail before it fails as an exception here.

    Returns whether there was one, and an iterator over all items, the first included.
    """
    try:
        first = await anext(events)
    except StopAsyncIteration:
        return False, events
    return True, _Rejoined(first, events)


class _Rejoined:
    """The items of `rest` with one before them; closing it closes `rest` even if nothing was read yet."""

    def __init__(self, first: Any, rest: AsyncIterator[Any]) -> None:
        self._pending = [first]
        self._rest = rest

    def __aiter__(self) -> _Rejoined:
        return self

    async def __anext__(self) -> Any:
        if self._pending:
            return self._pending.pop()
        return await anext(self._rest)

    async def aclose(self) -> None:
        close = getattr(self._rest, "aclose", None)
        if close is not None:
            await close()

"""Owns two ASGI layers in front of the routes: 503 before the engine is up, 413 for a body that is too large.

Used by the HTTP server. They look at paths and sizes only and must not parse a body.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.http.auth import route_path
from sglang.srt.entrypoints.http.errors import error_response
from sglang.srt.messages.errors import RequestRejected

#: Answered from the first moment on: an operator sees there how far the start is.
ALWAYS_OPEN = frozenset({"/health", "/ready", "/ping"})
#: Room for a prompt of some million tokens as text; more is a mistake or an attack.
MAX_BODY_BYTES = 64 << 20


class StartGate:
    """Answers 503 while `why_closed()` says why."""

    def __init__(self, app: ASGIApp, *, why_closed: Callable[[], str | None]) -> None:
        self._app = app
        self._why_closed = why_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in ALWAYS_OPEN:
            why = self._why_closed()
            if why is not None:
                await error_response(why, 503)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Answers 413 for a body over the limit, announced or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the request body is larger than {self._max_bytes} bytes"
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response(message, 413)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self._max_bytes:
                # Raised where the route reads its body, so the route answers it like any other refusal.
                raise RequestRejected(message, status_code=413)
            return part

        await self._app(scope, counted, send)

"""Owns who may call which route: bearer keys, the admin key, foreign origins.

One ASGI layer in front of all routes; every route has its level here, and the application refuses one that
has none. It must not log or answer a key, and it compares keys in constant time.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.http.errors import error_response


class Level(enum.Enum):
    """What a route asks of its caller."""

    PUBLIC = "public"  # nothing
    NORMAL = "normal"  # the API key (or the admin key), if there is one
    INFO = "info"  # any key, if there is one: it shows how the server is set up
    CONTROL = "control"  # the admin key, else the API key, else a loopback bind; never a foreign origin


_PUBLIC_PATHS = frozenset({"/health"})
_NORMAL_PATHS = frozenset(
    {
        "/",
        "/ping",
        "/ready",
        "/health_generate",
        "/generate",
        "/model_info",
        "/get_model_info",
        "/tokenizer_info",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
    }
)
_NORMAL_PREFIX = "/v1/"
_INFO_PATHS = frozenset({"/server_info", "/get_server_info", "/placement"})
_CONTROL_PATHS = frozenset({"/flush_cache", "/abort_request"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def level_of(path: str) -> Level | None:
    """The level of a route, None for a path that is no route of ours."""
    for level, paths in (
        (Level.PUBLIC, _PUBLIC_PATHS),
        (Level.INFO, _INFO_PATHS),
        (Level.CONTROL, _CONTROL_PATHS),
        (Level.NORMAL, _NORMAL_PATHS),
    ):
        if path in paths:
            return level
    return Level.NORMAL if path.startswith(_NORMAL_PREFIX) else None


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessPolicy:
    """The keys and the address of this server, and what it refuses by them."""

    host: str
    port: int
    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)

    def refusal(self, level: Level, headers: Headers) -> Response | None:
        """The answer to a caller who may not use a route of this level, None where he may."""
        if level is Level.PUBLIC:
            return None
        if level is Level.CONTROL:
            refusal = self._foreign_origin(headers) or self._open_to_the_network()
            if refusal is not None:
                return refusal
        accepted = self._accepted_keys(level)
        if not accepted:
            return None
        given = headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        token = token.strip()
        if scheme.lower() == "bearer" and token:
            if _matches(token, accepted):
                return None
            if _matches(token, self._keys()):
                return error_response("this route needs the admin key", 403)
        message = "a valid key is needed: send the header Authorization: Bearer KEY"
        refusal = error_response(message, 401)
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    def _keys(self) -> list[str]:
        return [key for key in (self.api_key, self.admin_api_key) if key is not None]

    def _accepted_keys(self, level: Level) -> list[str]:
        if level is Level.CONTROL and self.admin_api_key is not None:
            return [self.admin_api_key]
        if level is Level.NORMAL and self.api_key is None:
            return []
        return self._keys()

    def _open_to_the_network(self) -> Response | None:
        if self._keys() or is_loopback(self.host):
            return None
        return error_response(
            f"control routes are closed: the server listens on {self.host} and has no key. "
            "Start it with --admin-api-key (or --api-key), or bind it to 127.0.0.1",
            403,
        )

    def _foreign_origin(self, headers: Headers) -> Response | None:
        """A page of another site must not steer this server through the user's browser."""
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin):
            return error_response("control routes refuse requests from pages of another origin", 403)
        # A plain GET from an image or a link has no Origin, but browsers send where it comes from.
        if origin is None and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return error_response("control routes refuse requests from pages of another origin", 403)
        return None

    def _is_own_origin(self, origin: str) -> bool:
        try:
            parts = urlsplit(origin)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        except ValueError:
            return False
        # The Host header proves nothing: a rebound DNS name stands in both headers.
        own_names = _LOOPBACK_NAMES | {self.host.strip("[]").lower()}
        return (parts.hostname or "") in own_names and port == self.port


class AccessGate:
    """The ASGI layer."""

    def __init__(self, app: ASGIApp, *, policy: AccessPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # An unknown path is a 404, for callers with the key.
            level = level_of(route_path(scope)) or Level.NORMAL
            refusal = self._policy.refusal(level, Headers(scope=scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path as routes are matched on it, without the prefix of a proxy."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        return path[len(prefix) :] or "/"
    return path


def _matches(token: str, keys: list[str]) -> bool:
    """In constant time, whatever the lengths are; every key is compared."""
    # Header text is latin-1 by the standard; the bytes that the client sent are what is compared.
    given = hashlib.sha256(token.encode("latin-1", "replace")).digest()
    equal = [hmac.compare_digest(given, hashlib.sha256(key.encode()).digest()) for key in keys]
    return any(equal)

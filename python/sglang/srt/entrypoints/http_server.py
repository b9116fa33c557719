"""Owns the HTTP application: its routers and layers, and the uvicorn server around it.

Built by the server's main once the ranks are starting. It must not own the life-cycle, which is the main's,
or keep a request's state.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from sglang.srt.entrypoints.http.auth import AccessGate, AccessPolicy, level_of
from sglang.srt.entrypoints.http.control import build_control_router, build_health_router, build_info_router
from sglang.srt.entrypoints.http.errors import error_response, rejected_response
from sglang.srt.entrypoints.http.gates import BodyLimit, StartGate
from sglang.srt.entrypoints.http.listen_socket import BACKLOG
from sglang.srt.entrypoints.http.status import ServerStatus
from sglang.srt.entrypoints.native.native_api import build_native_router
from sglang.srt.entrypoints.openai.router import build_openai_router
from sglang.srt.environ import envs
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.runtime_context import get_observability, get_serving
from sglang.version import __version__

logger = logging.getLogger(__name__)


def build_app(status: ServerStatus, policy: AccessPolicy) -> FastAPI:
    """All but the OpenAI routes, which need the connected engine (`add_openai_routes`)."""
    serving = get_serving()
    hidden = envs.DISABLE_OPENAPI_DOC.get()
    app = FastAPI(
        title="sglang",
        version=__version__,
        openapi_url=None if hidden else "/openapi.json",
    )
    add_routes(app, build_health_router(status))
    add_routes(app, build_info_router(status))
    add_routes(app, build_control_router(status))
    add_routes(app, build_native_router(status, incremental=serving.incremental_streaming_output))
    _add_error_handlers(app)
    # The last one added is the outermost: CORS answers preflights, and sets its headers on refusals too.
    app.add_middleware(BodyLimit)
    app.add_middleware(StartGate, why_closed=status.why_closed)
    app.add_middleware(AccessGate, policy=policy)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_credentials=False,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    return app


def add_openai_routes(app: FastAPI, status: ServerStatus) -> None:
    """The routes that can only be built over a connected engine."""
    add_routes(app, build_openai_router(status.manager))


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Include a router, every route of which must have its level of access.

    `app.state.route_table` lists (method, path) of all that was added.
    """
    if not hasattr(app.state, "route_table"):
        app.state.route_table = set()
    table: set[tuple[str, str]] = app.state.route_table
    for route in router.routes:
        path = getattr(route, "path", str(route))
        if level_of(path) is None:
            raise RuntimeError(f"the route {path} has no level of access; give it one in http/auth.py")
        table.update((method, path) for method in getattr(route, "methods", ()))
    app.include_router(router)


def _add_error_handlers(app: FastAPI) -> None:
    """Every error has the same body, and a malformed request is 400, never 422."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = error_response(str(error.detail), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_response(f"{where}: {first['msg']}", 400, param=where or None)

    async def rejected(request: Request, error: Exception) -> Response:
        return rejected_response(error)

    async def failed(request: Request, error: Exception) -> Response:
        return error_response("the server failed to answer this request; its log says why", 500)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(RequestRejected, rejected)
    app.add_exception_handler(Exception, failed)


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is bound already. It captures no signals: the server's main does."""

    def __init__(self, app: FastAPI, sock: socket.socket) -> None:
        serving, observability = get_serving(), get_observability()
        level = observability.log_level_http or observability.log_level
        logging.getLogger("uvicorn").setLevel(level.upper())
        logging.getLogger("uvicorn.access").setLevel(level.upper())
        _leave_out_of_access_log(observability.uvicorn_access_log_exclude_prefixes)
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=envs.SGLANG_TIMEOUT_KEEP_ALIVE.get(),
            timeout_graceful_shutdown=5,
            ssl_keyfile=serving.ssl_keyfile,
            ssl_certfile=serving.ssl_certfile,
            backlog=BACKLOG,
            server_header=False,
            # The proxy has cut this prefix off; uvicorn tells the application that it was there.
            root_path=serving.fastapi_root_path,
        )
        super().__init__(config)
        self._sock = sock

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve(sockets=[self._sock])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _leave_out_of_access_log(prefixes: list[str]) -> None:
    if not prefixes:
        return
    left_out = tuple(prefixes)

    def keep(record: logging.LogRecord) -> bool:
        # uvicorn's access record: (client, method, path, HTTP version, status)
        args = record.args
        return not (isinstance(args, tuple) and len(args) >= 3 and str(args[2]).startswith(left_out))

    logging.getLogger("uvicorn.access").addFilter(keep)

"""Owns the routes that watch the server and steer it: health, information, cache and abort.

Included by the HTTP server. It must not show a secret: what it shows of the configuration comes from
`public_values`.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.http.errors import error_response, json_response, rejected_response
from sglang.srt.entrypoints.http.information import (
    model_information,
    server_information,
    tokenizer_information,
)
from sglang.srt.entrypoints.http.request_body import read_body, read_json
from sglang.srt.entrypoints.http.status import ServerStatus
from sglang.srt.environ import envs
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.request_fields import flag, shown, text
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__


def build_health_router(status: ServerStatus) -> APIRouter:
    """For watchers: does the server answer, is it healthy, does it take work."""
    router = APIRouter(tags=["health"])

    def answer(why: str | None) -> Response:
        return json_response({"status": "ok"}) if why is None else error_response(why, 503)

    async def hello() -> Response:
        return PlainTextResponse(f"sglang {__version__} is running; see /docs for its routes\n")

    async def ping() -> Response:
        return answer(None)

    async def health() -> Response:
        return answer(status.why_unhealthy())

    async def health_generate() -> Response:
        why = status.why_unhealthy()
        if why is None and envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.get():
            why = await _why_not_generating(status)
        return answer(why)

    for path, endpoint in (
        ("/", hello),
        ("/ping", ping),
        ("/health", health),
        ("/ready", health),
        ("/health_generate", health_generate),
    ):
        for method in ("GET", "HEAD"):
            router.add_api_route(path, endpoint, methods=[method])
    return router


async def _why_not_generating(status: ServerStatus) -> str | None:
    """Generate one token on every replica; naming the replica leaves the balance between them alone."""
    timeout = envs.SGLANG_HEALTH_CHECK_TIMEOUT.get()
    replicas = status.manager.limits.replicas
    probe = GenerateReqInput(
        input_ids=[[0]] * replicas,
        routed_dp_rank=list(range(replicas)),
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        no_logs=True,
    )
    try:
        async with asyncio.timeout(timeout):
            async for _ in status.manager.generate_request(probe):
                pass
    except TimeoutError:
        return f"Health check failed: no token within {timeout} s"
    except (RequestRejected, ValueError) as error:
        return f"Health check failed: {error}"
    return None


def build_info_router(status: ServerStatus) -> APIRouter:
    """What the server is and how it is set up."""
    router = APIRouter(tags=["information"])
    record = get_server_args()

    async def model_info() -> Response:
        return json_response(model_information(status.manager, record))

    async def server_info() -> Response:
        try:
            return json_response(
                await server_information(status.core, status.manager, record) | {"status": status.phase.value}
            )
        except RequestRejected as error:
            return rejected_response(error)

    async def placement() -> Response:
        try:
            return json_response(await status.manager.get_placement())
        except RequestRejected as error:
            return rejected_response(error)

    async def tokenizer_info() -> Response:
        tokenizer = status.manager.tokenizer
        if tokenizer is None:
            return error_response("the server runs with --skip-tokenizer-init and has no tokenizer", 404)
        return json_response(tokenizer_information(tokenizer, status.manager.model_config))

    for path, endpoint in (
        ("/model_info", model_info),
        ("/get_model_info", model_info),
        ("/server_info", server_info),
        ("/get_server_info", server_info),
        ("/placement", placement),
        ("/tokenizer_info", tokenizer_info),
    ):
        router.add_api_route(path, endpoint, methods=["GET"])
    return router


def build_control_router(status: ServerStatus) -> APIRouter:
    """What changes the state of the server."""
    router = APIRouter(tags=["control"])

    @router.post("/flush_cache")
    @router.get("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        try:
            timeout = _seconds(request.query_params.get("timeout", "0"))
            await _optional_body(request)
            answer = await status.manager.flush_cache(timeout)
        except (RequestRejected, ValueError) as error:
            return rejected_response(error)
        if not answer.success:
            return error_response(answer.message, 400)
        return PlainTextResponse("Cache flushed.\n")

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        try:
            body = await _optional_body(request)
            rid, abort_all = body.get("rid") or "", body.get("abort_all") or False
            status.manager.abort_request(text("rid", rid), flag("abort_all", abort_all))
        except (RequestRejected, ValueError) as error:
            return rejected_response(error)
        return json_response({"success": True})

    return router


async def _optional_body(request: Request) -> dict[str, object]:
    """The JSON object of a control call; none at all is an empty one."""
    if not await read_body(request):
        return {}
    body = await read_json(request)
    if not isinstance(body, dict):
        raise RequestRejected(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 3600.0:
        raise refused("timeout", f"must be seconds from 0 to 3600, got {shown(given)}")
    return seconds

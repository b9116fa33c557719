"""Owns SGLang's native route `/generate`: body to `GenerateReqInput`, answer as JSON or events.

Included by the HTTP server. It must not check what the tokenizer manager checks.
"""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from sglang.srt.entrypoints.http.dp_rank_header import dp_rank_of_header
from sglang.srt.entrypoints.http.errors import json_response, rejected_response, stream_error
from sglang.srt.entrypoints.http.request_body import read_json
from sglang.srt.entrypoints.http.sse import EventSource, EventStream
from sglang.srt.entrypoints.http.status import ServerStatus
from sglang.srt.entrypoints.native.generate_fields import parse_generate
from sglang.srt.messages.errors import RequestRejected


def build_native_router(status: ServerStatus, *, incremental: bool) -> APIRouter:
    """`/generate`, POST and PUT. `incremental` makes streams carry what is new instead of all so far."""
    router = APIRouter(tags=["native"])

    @router.post("/generate")
    @router.put("/generate")
    async def generate(request: Request) -> Response:
        try:
            obj = parse_generate(await read_json(request))
            replica = dp_rank_of_header(request.headers)
            if replica is not None:
                obj.routed_dp_rank = replica
            items = status.manager.generate_request(
                obj, request.is_disconnected, incremental=incremental and obj.stream is True
            )
            if obj.stream:
                events = EventSource(items)
                await events.begin()
                return EventStream(events, on_error=stream_error)
            async with contextlib.aclosing(items):
                answer = await anext(items)
        except (RequestRejected, ValueError) as error:
            return rejected_response(error)
        return json_response(answer)

    return router

"""Owns calling the OpenAI routes inside the test's own process: no socket, no server.

Read by the unit tests of those routes. It must not start a process; a real server is `server_fixture`'s.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from fastapi import FastAPI

from sglang.srt.entrypoints.openai.router import build_openai_router
from sglang.srt.entrypoints.openai.serving_job import ServingSettings
from sglang.test.fakes.fake_manager import FakeManager

#: A JSON object as a test reads it.
Json = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(
    manager: FakeManager,
    method: str,
    path: str,
    *,
    settings: ServingSettings | None = None,
    **kwargs: Any,
) -> httpx.Response:
    """One call of the routes over this manager."""
    app = FastAPI()
    app.include_router(build_openai_router(manager, settings or ServingSettings()))

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, **kwargs)
            manager.closed_when_answered = manager.closed
            return response

    return asyncio.run(call())


def post(manager: FakeManager, path: str, /, **body: Any) -> httpx.Response:
    """POST these fields; a chat gets a message and a completion a prompt when the test gives none."""
    settings = body.pop("settings", None)
    if path == CHAT and "input_ids" not in body:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    elif path == COMPLETIONS:
        body.setdefault("prompt", "hi")
    return request(manager, "POST", path, settings=settings, json=body)


def events(response: httpx.Response) -> list[Json]:
    """The chunks of a stream, which must be closed by `[DONE]` and nothing else."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], response.text[-200:]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def choices_of(chunks: list[Json], index: int = 0) -> list[Json]:
    """The choice objects of one index, in order."""
    return [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]

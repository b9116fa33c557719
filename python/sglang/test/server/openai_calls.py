"""Owns calling the OpenAI routes in the test's own process, over a manager and without a server.

Read by the unit tests of those routes. It must not start a process: `server_fixture` does that.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

from sglang.srt.entrypoints.openai.router import build_openai_router
from sglang.srt.entrypoints.openai.serving_job import ServingSettings
from sglang.test.fakes.scripted_manager import ScriptedManager
from sglang.test.server.openai_http import CHAT, COMPLETIONS, events, of_choice

__all__ = ["CHAT", "COMPLETIONS", "events", "of_choice", "post", "request"]


def request(
    manager: ScriptedManager,
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


def post(manager: ScriptedManager, path: str, /, **body: Any) -> httpx.Response:
    """POST these fields; a chat gets a message and a completion a prompt when the test gives none."""
    settings = body.pop("settings", None)
    if path == CHAT and "input_ids" not in body:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    elif path == COMPLETIONS:
        body.setdefault("prompt", "hi")
    return request(manager, "POST", path, settings=settings, json=body)

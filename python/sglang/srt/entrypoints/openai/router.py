"""Owns the paths of the OpenAI routes, and which handler answers each.

Read by the HTTP server, which adds keys, CORS and start-up. It must not hold state of its own.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from sglang.srt.entrypoints.openai.serving_base import serve
from sglang.srt.entrypoints.openai.serving_chat import ChatDialect
from sglang.srt.entrypoints.openai.serving_completions import CompletionDialect
from sglang.srt.entrypoints.openai.serving_job import Manager, ServingSettings
from sglang.srt.entrypoints.openai.serving_models import ModelList


def build_openai_router(manager: Manager, settings: ServingSettings | None = None) -> APIRouter:
    """The routes over this manager; `settings` default to what is published."""
    chosen = ServingSettings.from_context() if settings is None else settings
    chat, completions = ChatDialect(manager, chosen), CompletionDialect(manager)
    models = ModelList(manager)
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await serve(request, chat, manager, chosen)

    @router.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await serve(request, completions, manager, chosen)

    @router.get("/v1/models")
    @router.head("/v1/models")
    async def list_models() -> dict[str, object]:
        return models.all()

    @router.get("/v1/models/{model_id:path}")
    @router.head("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> Response:
        return models.one(model_id)

    return router

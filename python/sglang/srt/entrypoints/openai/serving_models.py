"""Owns `/v1/models` and `/v1/models/{id}`: the one model that is served, under its served name.

Read by `router`. It must not check the `model` of a generation request; that is echoed.
"""

from __future__ import annotations

import time

from starlette.responses import Response

from sglang.srt.entrypoints.http.errors import error_response, json_response
from sglang.srt.entrypoints.openai.serving_job import Manager

OWNER = "sglang"


class ModelList:
    """The served model as OpenAI's model objects; `created` is when the server began."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._created = int(time.time())

    def all(self) -> dict[str, object]:
        """`GET /v1/models`."""
        return {"object": "list", "data": [self._served()]}

    def one(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`; the id comes percent-decoded, so it may hold slashes and colons."""
        served = self._served()
        if model_id == served["id"]:
            return json_response(served)
        message = f"The model {model_id!r} does not exist; this server has {served['id']!r}"
        return error_response(message, 404, param="model", code="model_not_found")

    def _served(self) -> dict[str, object]:
        name = self._manager.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "root": name,
            "parent": None,
            "max_model_len": self._manager.model_config.context_len,
        }

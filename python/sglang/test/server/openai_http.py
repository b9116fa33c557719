"""Owns calls of a running server's OpenAI routes, and the parts of its answers.

Read by the server tests. Every call checks the shape of its answer; it must not know what a test expects in
it.
"""

from __future__ import annotations

from typing import Any

import httpx

from sglang.test.server.openai_calls import CHAT, COMPLETIONS, Json, choices_of, events

HELLO = [{"role": "user", "content": "Say hello to the world"}]
PROMPT = "the quick brown fox jumps over"
#: The most likely tokens, up to the limit.
GREEDY: Json = {"temperature": 0, "ignore_eos": True}


def post(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    """POST with a prompt or a message when the test gives none."""
    if path == CHAT and body.get("input_ids") is None:
        body.setdefault("messages", HELLO)
    elif path == COMPLETIONS:
        body.setdefault("prompt", PROMPT)
    return http.post(path, json=body)


def ask(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    """A call that must succeed."""
    response = post(http, path, **body)
    assert response.status_code == 200, response.text
    return response


def answer(http: httpx.Client, path: str, **body: Any) -> Json:
    """The whole answer of a call that must succeed."""
    found: Json = ask(http, path, **body).json()
    return found


def refused(http: httpx.Client, path: str, **body: Any) -> Json:
    """The error object of a call that must be 400, in both forms."""
    response = post(http, path, **body)
    assert response.status_code == 400, response.text
    flat = response.json()
    error: Json = flat["error"]
    assert error["message"] == flat["message"] and error["code"] == flat["code"] == 400
    return error


def stream(http: httpx.Client, path: str, **body: Any) -> list[Json]:
    """The chunks of a stream."""
    return events(ask(http, path, stream=True, **body))


def text_of(choice: Json) -> str:
    """The text of a choice or of a delta, in either dialect."""
    text: str = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]
    return text


def joined(chunks: list[Json], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(text_of(c) for c in choices_of(chunks, index))

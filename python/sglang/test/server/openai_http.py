"""Owns calling a running server's OpenAI routes without the openai client, and reading the answers.

Read by the server tests. Every call checks the form of its answer; it must not know what a test wants inside.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello to the world"}]
PROMPT = "the quick brown fox jumps over"
#: The most likely tokens, until the limit.
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


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


def answer(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The whole answer of a call that must succeed."""
    found: dict[str, Any] = ask(http, path, **body).json()
    return found


def refused(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The error object of a call that must be 400, in both forms."""
    response = post(http, path, **body)
    assert response.status_code == 400, response.text
    flat = response.json()
    error: dict[str, Any] = flat["error"]
    assert error["message"] == flat["message"] and error["code"] == flat["code"] == 400
    return error


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that must succeed."""
    return events(ask(http, path, stream=True, **body))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must be closed by `[DONE]` and nothing else."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], response.text[-200:]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def of_choice(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The choice objects of one index, in order."""
    return [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice or of a delta, in either dialect."""
    text: str = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]
    return text


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(text_of(c) for c in of_choice(chunks, index))

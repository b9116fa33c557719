"""Owns how far one choice of an answer has come: what is new in the engine's cumulative output.

Read by both OpenAI routes; a whole answer is one look at the last output, so it shares every rule with a
stream. It must not write chunks and must not know which dialect asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.logprobs import TokenLogprobs, read_native
from sglang.srt.messages.errors import RequestRejected


class News(msgspec.Struct, kw_only=True):
    """What one native output adds to a choice. `finish_reason` and `matched_stop` stay None until the end."""

    is_first: bool
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[TokenLogprobs]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    matched_stop: int | str | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing that a client would see: the text is held back and no token is reported."""
        return not (self.text or self.logprobs or self.prompt_logprobs)


class ChoiceProgress:
    """One choice. `take` gets each native output of it, in order; nothing follows the one that finishes."""

    def __init__(self, index: int, *, with_logprobs: bool = False) -> None:
        self.index = index
        self.finished = False
        #: The last `meta_info`, for usage.
        self.meta: Mapping[str, Any] = {}
        #: Whatever the dialect keeps between two chunks of this choice (offset counters).
        self.scratch: dict[str, Any] = {}
        self._with_logprobs = with_logprobs
        self._seen_chars = 0
        self._seen_ids = 0
        self._seen_logprobs = 0
        self._started = False

    def take(self, output: Mapping[str, Any]) -> News:
        """What is new in a native output (`text`, `output_ids` and logprobs are cumulative there)."""
        meta = output["meta_info"]
        text: str = output["text"]
        ids: list[int] = output.get("output_ids") or []
        news = News(
            is_first=not self._started,
            text=text[self._seen_chars :],
            token_ids=list(ids[self._seen_ids :]),
            prompt_token_ids=None if self._started else output.get("prompt_token_ids"),
            prompt_logprobs=[],
            logprobs=[],
        )
        if self._with_logprobs:
            news.logprobs = read_native(meta, "output", self._seen_logprobs)
            self._seen_logprobs += len(news.logprobs)
            if not self._started:
                news.prompt_logprobs = read_native(meta, "input")
        finish = meta.get("finish_reason")
        if finish is not None:
            news.finish_reason = finish["type"]
            news.matched_stop = finish.get("matched")
            self.finished = True
        self._started = True
        self._seen_chars = max(self._seen_chars, len(text))
        self._seen_ids = max(self._seen_ids, len(ids))
        self.meta = meta
        return news


def raise_if_failed(output: Mapping[str, Any]) -> None:
    """An abort that carries a status is an error; an abort asked for by the user is an ordinary end."""
    finish = output["meta_info"].get("finish_reason") or {}
    status = finish.get("status_code") if finish.get("type") == "abort" else None
    if status:
        kind = finish.get("err_type") or ("BadRequestError" if status < 500 else "InternalServerError")
        raise RequestRejected(finish.get("message") or "the request was aborted", int(status), None, kind)

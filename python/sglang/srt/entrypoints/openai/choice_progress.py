"""Owns how far one choice of an answer has come, and reads an incremental output of the engine as news.

Read by both OpenAI routes; a whole answer is one output in which everything is new, so it shares every rule
with a stream. It must not write chunks and must not know which dialect asks.
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
        self._started = False

    def take(self, output: Mapping[str, Any]) -> News:
        """The next native output (`text`, `output_ids` and the output's logprobs hold what is new there)."""
        meta = output["meta_info"]
        news = News(
            is_first=not self._started,
            text=output["text"],
            token_ids=output.get("output_ids") or [],
            prompt_token_ids=None if self._started else output.get("prompt_token_ids"),
            prompt_logprobs=[],
            logprobs=[],
        )
        if self._with_logprobs:
            news.logprobs = read_native(meta, "output")
            if not self._started:
                news.prompt_logprobs = read_native(meta, "input")
        finish = meta.get("finish_reason")
        if finish is not None:
            news.finish_reason = finish["type"]
            news.matched_stop = finish.get("matched")
            self.finished = True
        self._started = True
        self.meta = meta
        return news


def raise_if_failed(output: Mapping[str, Any]) -> None:
    """An abort that carries a status is an error; an abort asked for by the user is an ordinary end."""
    finish = output["meta_info"].get("finish_reason") or {}
    status = finish.get("status_code") if finish.get("type") == "abort" else None
    if status:
        kind = finish.get("err_type") or ("BadRequestError" if status < 500 else "InternalServerError")
        raise RequestRejected(finish.get("message") or "the request was aborted", int(status), None, kind)

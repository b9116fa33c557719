"""Owns what the server remembers of a request in flight, and the native answer built from it.

One `CallState` per call of `generate_request`, one `SampleState` per sequence sent to the scheduler. Written
by the tokenizer manager's receive loop, read by the waiting call. It must not send, decode text or know about
HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang.srt.messages.io_struct import FinishReason, TokenizedGenerateReqInput, TokenLogprob, TokenOutput

#: [logprob, token id, text or null]
LogprobEntry = tuple[float | None, int, str | None]


class SampleState:
    """One sequence: what it was sent as, and everything that came back."""

    __slots__ = (
        "cached_tokens",
        "call",
        "completion_tokens",
        "created",
        "dirty",
        "dp_rank",
        "finish_reason",
        "finished_at",
        "index",
        "input_logprobs",
        "message",
        "num_retractions",
        "output_ids",
        "output_logprobs",
        "prompt_tokens",
        "text",
    )

    def __init__(self, call: CallState, message: TokenizedGenerateReqInput, index: int) -> None:
        self.call = call
        self.message = message
        self.index = index
        self.created = time.monotonic()
        self.finished_at: float | None = None
        self.dirty = False
        self.text = ""
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_tokens = len(message.input_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.num_retractions = 0
        self.dp_rank = 0
        self.input_logprobs: list[TokenLogprob] = []
        self.output_logprobs: list[TokenLogprob] = []

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: TokenOutput, text: str, dp_rank: int) -> None:
        """Add the news of one scheduler step. `text` is the whole text that may be shown."""
        self.text = text
        self.output_ids.extend(output.new_ids)
        self.prompt_tokens = output.prompt_tokens
        self.completion_tokens = output.completion_tokens
        self.cached_tokens = output.cached_tokens
        self.num_retractions = output.num_retractions
        self.dp_rank = dp_rank
        if output.input_logprobs:
            self.input_logprobs = output.input_logprobs
        if output.output_logprobs:
            self.output_logprobs.extend(output.output_logprobs)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.finished_at = time.monotonic()


class CallState:
    """One call: its samples, the bell that wakes it, and which samples have news."""

    def __init__(self) -> None:
        self.samples: list[SampleState] = []
        self.bell = asyncio.Event()
        self.news: deque[SampleState] = deque()
        self.error: Exception | None = None
        #: Set by the ticker: time to look whether the client is still there.
        self.look_for_client = False

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    def announce(self, sample: SampleState) -> None:
        """A sample has news; several before the next look are told as one."""
        if not sample.dirty:
            sample.dirty = True
            self.news.append(sample)
        self.bell.set()

    def fail(self, error: Exception) -> None:
        """The whole call ends with this error (the first one counts)."""
        if self.error is None:
            self.error = error
        self.bell.set()


class _Told:
    """What a call has been told of one sample, so that an answer costs what is new and not what there is."""

    __slots__ = ("chars", "ids", "input", "input_source", "logprobs", "output")

    def __init__(self) -> None:
        self.chars = 0
        self.ids = 0
        self.logprobs = 0
        self.input: dict[str, list[Any]] = {}
        self.input_source: list[TokenLogprob] | None = None
        #: The native lists so far; an incremental call keeps none.
        self.output: dict[str, list[Any]] = {}


class AnswerBuilder:
    """Native answers: `{"text", "output_ids", "meta_info", ["prompt_token_ids"], ["index"]}` of one call.

    Cumulative, or with `incremental` only what is new in `text`, `output_ids` and the output's logprobs;
    counts and everything about the prompt are whole in both.
    """

    def __init__(
        self,
        *,
        weight_version: str,
        return_prompt_token_ids: bool,
        token_text: Callable[[int], str | None] | None,
        incremental: bool = False,
    ) -> None:
        self._weight_version = weight_version
        self._return_prompt_token_ids = return_prompt_token_ids
        self._token_text = token_text
        self._incremental = incremental
        self._told: dict[int, _Told] = {}

    def answer(self, sample: SampleState, *, with_index: bool) -> dict[str, Any]:
        """What is known of one sample by now. The lists are the reader's: later news do not change them."""
        told = self._told.setdefault(sample.index, _Told())
        answer: dict[str, Any] = {
            "text": sample.text[told.chars :],
            "output_ids": sample.output_ids[told.ids :],
            "meta_info": self._meta_info(sample, told),
        }
        if self._incremental:
            told.chars, told.ids = len(sample.text), len(sample.output_ids)
        if self._return_prompt_token_ids:
            answer["prompt_token_ids"] = sample.message.input_ids
        if with_index:
            answer["index"] = sample.index
        return answer

    def _meta_info(self, sample: SampleState, told: _Told) -> dict[str, Any]:
        reason = sample.finish_reason
        meta: dict[str, Any] = {
            "id": sample.rid,
            "finish_reason": None if reason is None else reason.to_json(),
            "prompt_tokens": sample.prompt_tokens,
            "completion_tokens": sample.completion_tokens,
            "cached_tokens": sample.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": self._weight_version,
            "num_retractions": sample.num_retractions,
            "dp_rank": sample.dp_rank,
        }
        if sample.message.return_logprob:
            self._add_logprobs(meta, sample, told)
        if sample.finished_at is not None:
            meta["e2e_latency"] = sample.finished_at - sample.created
            meta["response_sent_to_client_ts"] = time.time()
        return meta

    def _add_logprobs(self, meta: dict[str, Any], sample: SampleState, told: _Told) -> None:
        if told.input_source is not sample.input_logprobs:
            told.input_source = sample.input_logprobs
            told.input = self._native("input", sample.message, sample.input_logprobs)
        meta.update(told.input)
        fresh = self._native("output", sample.message, sample.output_logprobs[told.logprobs :])
        told.logprobs = len(sample.output_logprobs)
        for name, entries in fresh.items():
            if self._incremental:
                meta[name] = entries
            else:
                told.output.setdefault(name, []).extend(entries)
                meta[name] = list(told.output[name])
        meta["output_token_logprobs_length"] = len(sample.output_logprobs)

    def _native(
        self, side: str, message: TokenizedGenerateReqInput, entries: list[TokenLogprob]
    ) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {
            f"{side}_token_logprobs": [self._entry(e.logprob, e.token_id) for e in entries]
        }
        if message.top_logprobs_num > 0:
            lists[f"{side}_top_logprobs"] = [self._entries(e.top) for e in entries]
        if message.token_ids_logprob is not None:
            lists[f"{side}_token_ids_logprobs"] = [self._entries(e.chosen) for e in entries]
        return lists

    def _entries(self, pairs: list[tuple[float, int]] | None) -> list[LogprobEntry] | None:
        return None if pairs is None else [self._entry(logprob, token_id) for logprob, token_id in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        text = None if self._token_text is None else self._token_text(token_id)
        return (logprob, token_id, text)

"""Owns what the server keeps of a request in flight.

One `CallState` for each call of `generate_request`, one `SampleState` for each sequence sent to the
scheduler. Written by the tokenizer manager's receive loop, read by the waiting call. It must not send or
decode text.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sglang.srt.messages.requests import FinishReason, TokenizedGenerateReqInput, TokenLogprob, TokenOutput


class SampleState:
    """One sequence: what it was sent as, and everything that came back."""

    __slots__ = (
        "cached_tokens",
        "call",
        "completion_tokens",
        "created",
        "dp_rank",
        "finish_reason",
        "finished_at",
        "index",
        "input_logprobs",
        "is_queued",
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
        self.is_queued = False
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
        """Add the output of one scheduler step. `text` is the whole text that may be shown."""
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
    """One call: its samples, which of them have something new, and the event that wakes it."""

    def __init__(self) -> None:
        self.samples: list[SampleState] = []
        self.wakeup = asyncio.Event()
        self.updated: deque[SampleState] = deque()
        self.error: Exception | None = None
        #: Set now and then: time to see whether the client is still connected.
        self.check_client = False

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    def notify(self, sample: SampleState) -> None:
        """A sample has something new; outputs that come before the call wakes are handed out as one."""
        if not sample.is_queued:
            sample.is_queued = True
            self.updated.append(sample)
        self.wakeup.set()

    def fail(self, error: Exception) -> None:
        """The whole call ends with this error (the first one counts)."""
        if self.error is None:
            self.error = error
        self.wakeup.set()

"""Owns what the server keeps of a request in flight.

One `CallState` for each call of `generate_request`, one `SampleState` for each sequence sent to the
scheduler. Written by the tokenizer manager's receive loop, read by the waiting call. It must not send or
decode text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque

from sglang.srt.messages.requests import (
    FinishReason,
    SpecCounts,
    TokenizedGenerateReqInput,
    TokenLogprob,
    TokenOutput,
)


@dataclasses.dataclass(slots=True, eq=False)
class SampleState:
    """One sequence: what it was sent as, and everything that came back."""

    call: CallState
    message: TokenizedGenerateReqInput
    index: int
    created: float = dataclasses.field(default_factory=time.monotonic)
    finished_at: float | None = None
    #: Among its call's `updated`.
    is_queued: bool = False
    text: str = ""
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens: int = dataclasses.field(init=False)
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    #: What a draft did for it so far; None without one.
    spec: SpecCounts | None = None
    dp_rank: int = 0
    input_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    output_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.message.input_ids)

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
        self.spec = output.spec
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

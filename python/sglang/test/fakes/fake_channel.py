"""Owns the scheduler's channel in memory, and what was sent through it, joined into answers.

Read by scheduler tests and the layout lab. It must not deliver anything by itself: tests fill the inbox.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    Message,
    SpecCounts,
    TokenLogprob,
)


class FakeChannel:
    """Both directions in this process."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.sent: list[Message] = []
        self.waits = 0

    def recv_all(self, most: int | None = None) -> list[Message]:
        count = len(self.inbox) if most is None else min(most, len(self.inbox))
        return [self.inbox.popleft() for _ in range(count)]

    def wait(self, timeout_s: float) -> None:
        self.waits += 1

    def send(self, message: Message) -> None:
        self.sent.append(message)


@dataclass
class Answer:
    """Everything that was sent about one request, joined; a second end or a lost token is an assertion."""

    ids: list[int] = field(default_factory=list)
    events: list[list[int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    completion_tokens: int = 0
    spec: SpecCounts | None = None


def answers(channel: FakeChannel) -> dict[str, Answer]:
    """The answers by rid."""
    joined: dict[str, Answer] = {}
    for message in channel.sent:
        if not isinstance(message, BatchTokenIDOutput):
            continue
        for output in message.outputs:
            answer = joined.setdefault(output.rid, Answer())
            assert answer.finish_reason is None, f"{output.rid} was heard of after its end"
            assert output.input_logprobs is None or not answer.events, "prompt logprobs came twice or late"
            answer.ids += output.new_ids
            answer.events.append(list(output.new_ids))
            assert output.completion_tokens == len(answer.ids), "a token was lost or sent twice"
            if output.output_logprobs is not None:
                assert len(output.output_logprobs) == len(output.new_ids)
                answer.output_logprobs += output.output_logprobs
            if output.input_logprobs is not None:
                answer.input_logprobs = list(output.input_logprobs)
            answer.finish_reason = output.finish_reason
            answer.prompt_tokens = output.prompt_tokens
            answer.cached_tokens = output.cached_tokens
            answer.num_retractions = output.num_retractions
            answer.completion_tokens = output.completion_tokens
            answer.spec = output.spec
    return joined

"""Owns what leaves the scheduler: which requests have output to send, and one message for a whole step.

Filled by the result processor, the receiver and the scheduler. It must not change a request, except how many
of its tokens were sent.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenOutput,
)


class OutputStreamer:
    """A stream gets its first token at once and then every `stream_interval` tokens, others report rarely."""

    def __init__(
        self, send: Callable[[BatchTokenIDOutput], None], limits: SchedulerLimits, *, dp_rank: int = 0
    ) -> None:
        self._send = send
        self._dp_rank = dp_rank
        self.num_ended = 0  # with refusals
        self._interval = limits.stream_interval
        self._hidden_interval = limits.hidden_stream_interval
        self._outputs: list[TokenOutput] = []

    def collect(self, req: Req) -> None:
        """Take the new output of `req` if it is due. Every token and every end is taken exactly once."""
        if req.finish_reason is None:
            unsent = len(req.output_ids) - req.num_sent
            if not req.stream:
                if unsent < self._hidden_interval:
                    return
            elif req.num_sent and unsent < (req.sampling.params.stream_interval or self._interval):
                return
        else:
            self.num_ended += 1
        first, sent = req.num_sent == 0, req.num_sent
        req.num_sent = len(req.output_ids)
        self._outputs.append(
            TokenOutput(
                rid=req.rid,
                new_ids=req.output_ids[sent:],
                finish_reason=req.finish_reason,
                prompt_tokens=len(req.prompt_ids),
                completion_tokens=len(req.output_ids),
                cached_tokens=req.cached_tokens or 0,
                num_retractions=req.num_retractions,
                output_logprobs=req.output_logprobs[sent:] if req.return_logprob else None,
                input_logprobs=req.input_logprobs
                if first and req.return_logprob and req.logprob_start >= 0
                else None,
                spec=None if req.spec is None else req.spec.snapshot(),
            )
        )

    def refuse(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        """Answer a request that never entered the queue."""
        self.num_ended += 1
        self._outputs.append(
            TokenOutput(
                rid=message.rid,
                new_ids=[],
                finish_reason=reason,
                prompt_tokens=len(message.input_ids),
                completion_tokens=0,
                cached_tokens=0,
                num_retractions=0,
                output_logprobs=[] if message.return_logprob else None,
                input_logprobs=[] if message.return_logprob and message.logprob_start_len >= 0 else None,
            )
        )

    def flush(self) -> None:
        """Send what was taken since the last flush, as one message."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send(BatchTokenIDOutput(outputs=outputs, dp_rank=self._dp_rank))

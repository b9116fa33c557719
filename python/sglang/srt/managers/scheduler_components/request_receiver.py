"""Owns which requests are queued or refused when they arrive, and which are taken out again before their end.

Called by the scheduler at the start of every step. It must not plan; what it accepts waits in the queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sglang.srt.batch.req import Req
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.managers.scheduler_components.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.schedule_batch import RequestQueues
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.io_struct import AbortReq, FinishReason, SpecCounts, TokenizedGenerateReqInput
from sglang.srt.messages.sampling_fields import check_sampled_ids


class RequestReceiver:
    """Makes waiting `Req`s of requests; takes them out again on an abort or when their time is over."""

    def __init__(
        self,
        queues: RequestQueues,
        *,
        limits: SchedulerLimits,
        enqueue: Callable[[Req], None],
        processor: BatchResultProcessor,
        streamer: OutputStreamer,
        stop_matcher: StopMatcher,
    ) -> None:
        self._queues = queues
        self._limits = limits
        self._enqueue = enqueue
        self._processor = processor
        self._streamer = streamer
        self._stop_matcher = stop_matcher
        self._num_arrived = 0
        #: Noted and not carried out yet: those of one rid, and the others.
        self._aborted_rids: set[str] = set()
        self._aborts: list[AbortReq] = []
        self._has_deadlines = limits.waiting_timeout_s > 0 or limits.running_timeout_s > 0

    def accept(self, message: TokenizedGenerateReqInput, now: float) -> None:
        """Queue a request that arrived at `now`, or answer at once why not."""
        if self._is_aborted(message.rid):
            self.end_aborted()  # those before it, not this one
        reason = self._reason_to_refuse(message)
        if reason is not None:
            self._streamer.refuse(message, reason)
            return
        params = message.sampling_params
        room = self._limits.context_len - len(message.input_ids)
        allowed = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        if params.sampling_seed is None:
            raise RuntimeError(
                f"request {message.rid!r} came without a sampling_seed: whoever tokenizes it sets one"
            )
        sampling = SamplingState(params, params.sampling_seed, self._stop_matcher.end_ids(params))
        req = Req(message, sampling, allowed, self._num_arrived)
        if self._limits.has_draft:
            req.spec = SpecCounts()
        self._num_arrived += 1
        req.queued_at = now
        self._enqueue(req)

    def _reason_to_refuse(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        limits, length = self._limits, len(message.input_ids)
        if length == 0:
            return _refusal(400, "the prompt is empty: at least one token is needed")
        if length >= limits.context_len:
            return _refusal(
                400,
                f"The input ({length} tokens) is longer than the model's context length "
                f"({limits.context_len} tokens): shorten the prompt",
            )
        if length + 1 > limits.pool_size:
            return _refusal(
                400,
                f"The input ({length} tokens) and one new token do not fit into the KV cache "
                f"({limits.pool_size} tokens): shorten the prompt or start with a larger --max-total-tokens",
            )
        wrong = self._wrong_ids(message)
        if wrong is not None:
            return _refusal(400, wrong)
        if message.sampling_params.stop and not self._stop_matcher.reads_text:
            return _refusal(
                400, "stop: a stop string needs a tokenizer; use stop_token_ids, or start with a tokenizer"
            )
        if self._is_full():
            self.end_aborted()
            if self._is_full():
                return _refusal(503, "The request queue is full.", err_type="ServiceUnavailable")
        return None

    def _is_full(self) -> bool:
        most = self._limits.max_queued_requests
        return most is not None and len(self._queues.waiting) >= most

    def _wrong_ids(self, message: TokenizedGenerateReqInput) -> str | None:
        """Which id lies outside the vocabulary, as a sentence: it would fail every request of its batch."""
        size = self._limits.vocab_size
        for name, ids in (("input_ids", message.input_ids), ("token_ids_logprob", message.token_ids_logprob)):
            if ids and (min(ids) < 0 or max(ids) >= size):
                wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
                return f"{name}: token id {wrong} is outside the vocabulary (0 <= id < {size})"
        if not 0 <= message.top_logprobs_num <= size:
            return f"top_logprobs_num: must lie between 0 and {size}, got {message.top_logprobs_num}"
        try:
            check_sampled_ids(message.sampling_params, size)
        except RequestRejected as error:
            return error.message
        return None

    def abort(self, message: AbortReq) -> None:
        """Note an abort; `end_aborted` carries it out, with all others of the step in one pass."""
        if message.exact and message.rid and not message.abort_all:
            self._aborted_rids.add(message.rid)
        else:
            self._aborts.append(message)

    def _is_aborted(self, rid: str) -> bool:
        return rid in self._aborted_rids or any(message.names(rid) for message in self._aborts)

    def end_aborted(self) -> None:
        """End every request that a noted abort names, at any stage; each is answered with the ids it has."""
        if self._aborted_rids or self._aborts:
            self._take_out(
                lambda req: self._is_aborted(req.rid), FinishReason(type="abort", message="Aborted")
            )
            self._aborted_rids.clear()
            self._aborts.clear()

    def expire(self, now: float) -> None:
        """End requests that have waited or run longer than the environment allows.

        `now` is the group's time, so all ranks end them in the same step.
        """
        if not self._has_deadlines:
            return
        limits = self._limits
        for req in self._queues.started():
            if req.started_at is None:
                req.started_at = now
        if limits.waiting_timeout_s > 0:
            self._take_out(
                lambda req: req.started_at is None and now - req.queued_at > limits.waiting_timeout_s,
                _refusal(
                    503,
                    f"The request waited longer than {limits.waiting_timeout_s:g} s",
                    "ServiceUnavailable",
                ),
            )
        if limits.running_timeout_s > 0:
            self._take_out(
                lambda req: req.started_at is not None and now - req.started_at > limits.running_timeout_s,
                _refusal(
                    503, f"The request ran longer than {limits.running_timeout_s:g} s", "ServiceUnavailable"
                ),
            )

    def _take_out(self, is_named: Callable[[Req], bool], reason: FinishReason) -> None:
        """Walks the waiting queue once."""
        queues = self._queues
        named = [req for req in queues.started() if is_named(req)]
        waiting: deque[Req] = deque()
        for req in queues.waiting:
            (named if is_named(req) else waiting).append(req)
        if not named:
            return
        for req in named:
            self._processor.end(req, reason)
        queues.running = [req for req in queues.running if req.finish_reason is None]
        queues.waiting = waiting
        if queues.prefilling is not None and queues.prefilling.finish_reason is not None:
            queues.prefilling = None


def _refusal(status_code: int, message: str, err_type: str = "BadRequestError") -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=status_code, err_type=err_type)

"""Owns what a forward's result does to its requests: appends tokens and logprobs, finds ends, frees slots.

Called by the scheduler after every forward. It must not plan, and it sends only through the streamer.
"""

from __future__ import annotations

from sglang.srt.batch.forward_batch import GenerationBatchResult
from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.schedule_batch import PrefillPart, RequestQueues, ScheduledBatch
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import FinishReason, TokenLogprob


class BatchResultProcessor:
    """A complete prompt joins the running requests; a request that ends leaves its pages in the cache."""

    def __init__(
        self, queues: RequestQueues, kv: RequestKV, streamer: OutputStreamer, stop_matcher: StopMatcher
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._streamer = streamer
        self._stop_matcher = stop_matcher
        self._most_tokens = 0  # that each request may get from the batch at hand

    def process(self, batch: ScheduledBatch, result: GenerationBatchResult) -> int:
        """Enter the result of `batch` in its requests; returns how many tokens they got."""
        result.read()
        before = sum(len(req.output_ids) for req in batch.reqs)
        self._most_tokens = batch.forward.slots_per_request
        if batch.parts is None:
            self._process_decode(batch.reqs, result)
        else:
            for place, part in enumerate(batch.parts):
                self._process_part(place, part, result)
            self._process_decode(batch.reqs[len(batch.parts) :], result, first=len(batch.parts))
        return sum(len(req.output_ids) for req in batch.reqs) - before

    def end(self, req: Req, reason: FinishReason, *, keep: bool = True) -> None:
        """`req` ends now, at whatever stage; the caller takes it out of the queues."""
        req.finish_reason = reason
        if req.req_pool_idx is not None:
            self._kv.release(req, keep=keep)
        self._streamer.collect(req)

    def _process_part(self, place: int, part: PrefillPart, result: GenerationBatchResult) -> None:
        req = part.req
        failure = result.failures[place]
        if failure is not None:
            if self._queues.prefilling is req:
                self._queues.prefilling = None
            self._fail(req, failure)
            return
        if req.wants_input_logprobs:
            self._take_input_logprobs(req, place, part, result)
        if not part.completes_prompt:
            self._kv.commit(req)
        elif not req.draws_a_token:
            self.end(req, FinishReason(type="length", length=0))
        elif not self._take_tokens(req, place, result):
            self._kv.commit(req)
            self._queues.running.append(req)

    def _process_decode(self, reqs: list[Req], result: GenerationBatchResult, *, first: int = 0) -> None:
        """Enter what requests got that decoded; they are those of the batch from place `first` on."""
        failures = result.failures
        some_ended = False
        correct, proposed = result.num_correct_drafts, result.num_proposed_drafts
        for place, req in enumerate(reqs, first):
            if correct is not None and req.spec is not None:
                req.spec.add_round(correct[place], proposed)
            failure = failures[place]
            if self._take_tokens(req, place, result, may_be_none=failure is not None):
                some_ended = True
            elif failure is not None:
                self._fail(req, failure)
                some_ended = True
        if some_ended:
            self._queues.running = [req for req in self._queues.running if req.finish_reason is None]

    def _take_tokens(
        self, req: Req, place: int, result: GenerationBatchResult, *, may_be_none: bool = False
    ) -> bool:
        """Append the drawn tokens one by one and report them; True when the request ended with one of them.

        What was drawn behind that one is dropped: its slots count as reserved, not as tokens in the cache.
        """
        token_ids = result.next_token_ids[place]
        if not token_ids and not may_be_none:
            raise RuntimeError(f"the forward drew no token for request {req.rid!r} and reported no failure")
        if len(token_ids) > self._most_tokens:
            raise RuntimeError(
                f"the forward gave {len(token_ids)} tokens for request {req.rid!r}, which was given slots "
                f"for {self._most_tokens}: no round may be wider than slots_per_request"
            )
        logprobs = [] if result.output_logprobs is None else result.output_logprobs[place]
        if req.return_logprob and len(logprobs) != len(token_ids):
            raise RuntimeError(
                f"the forward gave {len(logprobs)} log-probabilities for the {len(token_ids)} tokens of "
                f"request {req.rid!r}, which asked for them"
            )
        for at, token_id in enumerate(token_ids):
            req.output_ids.append(token_id)
            req.sampling.append(token_id)
            req.kv_len = req.seq_len - 1
            if req.return_logprob:
                req.output_logprobs.append(logprobs[at])
            reason = self._stop_matcher.check(req)
            if reason is not None:
                self.end(req, reason)
                return True
        if token_ids:
            self._streamer.collect(req)
        return False

    def _take_input_logprobs(
        self, req: Req, place: int, part: PrefillPart, result: GenerationBatchResult
    ) -> None:
        if not req.input_logprobs and req.logprob_start < req.num_prompt_tokens:
            # Nothing predicts the first entry.
            req.input_logprobs.append(
                TokenLogprob(logprob=None, token_id=int(req.prompt_ids[req.logprob_start]))
            )
        _, targets = req.prompt_targets(part.start, part.end)
        given = [] if result.input_logprobs is None else result.input_logprobs[place] or []
        if len(given) != len(targets):
            raise RuntimeError(
                f"the forward gave {len(given)} prompt log-probabilities for request {req.rid!r}, "
                f"which asked for {len(targets)}"
            )
        req.input_logprobs.extend(given)
        if part.completes_prompt:
            req.wants_input_logprobs = False

    def _fail(self, req: Req, failure: str) -> None:
        """This request alone failed; what it computed last is not kept."""
        self.end(
            req,
            FinishReason(type="abort", message=failure, status_code=500, err_type="InternalServerError"),
            keep=False,
        )

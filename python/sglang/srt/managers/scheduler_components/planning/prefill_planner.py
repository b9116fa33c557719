"""Owns which prompts, or chunks of them, the next forward computes, and who may start.

Asked by the batch planner before anything decodes. It must not take room from a request that has started; it
moves requests from the waiting queue into a batch.
"""

from __future__ import annotations

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.planning.schedule_policy import (
    DEFERRED_PER_STEP,
    NewTokenRatio,
    PrefillBudget,
    count_deferral,
    queue_order,
    take_out,
    waits_for,
)
from sglang.srt.managers.scheduler_components.schedule_batch import PrefillPart, RequestQueues
from sglang.srt.mem_cache.base_prefix_cache import PrefixMatch
from sglang.srt.mem_cache.request_kv import RequestKV

#: After the queue's head found no room, so many steps pass before it is looked at again (unless a request
#: comes or goes).
RETRY_STEPS = 8


class PrefillPlanner:
    """A request that does not fit blocks those behind it, so nobody is overtaken for ever."""

    def __init__(
        self, queues: RequestQueues, kv: RequestKV, limits: SchedulerLimits, ratio: NewTokenRatio
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._ratio = ratio
        self._num_started_ever = 0
        self._refused = (0, 0)
        self._steps_to_retry = 0

    @property
    def can_start(self) -> bool:
        """True while a request waits and one more may run; the pool's room shows when it is planned."""
        return bool(self._queues.waiting) and self._queues.num_started < self._limits.max_running_requests

    def note_arrival(self, req: Req) -> None:
        """`req` joins the end of the queue."""
        req.passed_over_from = self._num_started_ever
        self._queues.waiting.append(req)

    def plan(self, *, may_start: bool, most_tokens: int | None = None) -> list[PrefillPart]:
        """The parts of the next prefill, none when there is nothing to compute or no room to start.

        `most_tokens` bounds them beside the configured limits, where prompts are cut.
        """
        queues = self._queues
        starts = may_start and bool(queues.waiting)
        if queues.prefilling is None and not starts:
            return []
        budget = self._new_budget(most_tokens)
        parts: list[PrefillPart] = []
        if queues.prefilling is not None:
            req = queues.prefilling
            part = self._make_part(req, min(req.seq_len - req.kv_len, budget.tokens), budget)
            parts.append(part)
            if part.completes_prompt:
                queues.prefilling = None
        if starts and budget.tokens > 0 and budget.requests > 0:
            self._admit(parts, budget)
        return parts

    def _new_budget(self, most_tokens: int | None) -> PrefillBudget:
        limits = self._limits
        tokens = limits.max_prefill_tokens
        if limits.chunk_size is not None:
            tokens = min(tokens, limits.chunk_size)
            if most_tokens is not None:
                tokens = min(tokens, most_tokens)
        requests = limits.prefill_max_requests
        return PrefillBudget(
            tokens=tokens,
            requests=limits.max_running_requests if requests is None else requests,
            cuts_prompts=limits.chunk_size is not None,
        )

    def _make_part(self, req: Req, count: int, budget: PrefillBudget) -> PrefillPart:
        """Allocate the next `count` tokens of a request that has a row.

        There is room: a prompt is admitted with all its tokens reserved, and no request decodes before it is
        complete.
        """
        start, end = req.kv_len, req.kv_len + count
        slots = self._kv.extend(req, end)
        assert slots is not None, "an admitted prompt lost its reserved room"
        budget.spend(count)
        ids = req.token_ids()
        next_id = int(ids[end]) if end < len(ids) else None
        return PrefillPart(req, ids[start:end], start, end, slots, next_id)

    def _admit(self, parts: list[PrefillPart], budget: PrefillBudget) -> None:
        """Start waiting requests until tokens, requests or room run out.

        A request whose prefix is being computed by another one waits for it.
        """
        queues, limits = self._queues, self._limits
        if len(queues.running) + len(parts) >= limits.max_running_requests or self._is_still_refused():
            return
        ordered = queue_order(
            queues.waiting,
            limits.schedule_policy,
            lambda req: len(self._kv.match(req)),
            self._num_started_ever,
        )
        reserved = sum(map(self._reserve, queues.running)) + sum(self._reserve(part.req) for part in parts)
        shares = self._kv.prefix_cache.keeps
        admitted: set[int] = set()
        num_deferred = 0
        for req in ordered:
            if len(queues.running) + len(parts) >= limits.max_running_requests:
                break
            match = self._kv.match(req)
            if shares:
                leader = waits_for(req, len(match), (part.req for part in parts), self._kv.page_size)
                if leader is not None and count_deferral(req, leader):
                    num_deferred += 1
                    if num_deferred == DEFERRED_PER_STEP:
                        break
                    continue
            part = self._start(req, match, budget, reserved, first=not parts)
            if part is None:
                self._refused, self._steps_to_retry = (len(queues.running), len(queues.waiting)), RETRY_STEPS
                break
            parts.append(part)
            admitted.add(req.arrival)
            reserved += self._reserve(req)
            if not part.completes_prompt:
                queues.prefilling = req
            if budget.tokens <= 0 or budget.requests <= 0:
                break
        if admitted:
            take_out(queues.waiting, admitted)
        elif not parts and not queues.running:
            self._raise_stuck()

    def _is_still_refused(self) -> bool:
        """True for a few steps after a refusal while nothing came or went: matching would be in vain."""
        queues = self._queues
        if self._steps_to_retry == 0 or self._refused != (len(queues.running), len(queues.waiting)):
            return False
        self._steps_to_retry -= 1
        return bool(queues.running)

    def _start(
        self, req: Req, match: PrefixMatch, budget: PrefillBudget, reserved: int, *, first: bool
    ) -> PrefillPart | None:
        """Give a waiting request its row and the slots of its first chunk.

        None, with nothing changed, when it must wait.
        """
        count = budget.take(req.seq_len - len(match), first=first)
        if count == 0 or self._kv.req_to_token_pool.available_size() == 0:
            return None
        # Alone it may start without room for its expected output: it can only end, never wait for others.
        alone = first and not self._queues.running
        target = req.seq_len if alone else self._expected_len(req)
        needed = self._kv.whole_pages(target) - len(match) + reserved
        if needed > self._kv.room():
            return None
        self._kv.begin(req, match)
        if needed > self._kv.room():  # its prefix was counted as room until it was locked
            self._kv.release(req, keep=False)
            return None
        part = self._make_part(req, count, budget)
        if req.cached_tokens is None:
            req.cached_tokens = len(match)
        self._num_started_ever += 1
        return part

    def _reserve(self, req: Req) -> int:
        """Room that a started request will still need: the rest of its prompt and its expected output."""
        pages = self._kv.whole_pages
        return pages(self._expected_len(req)) - pages(req.reserved_len)

    def _expected_len(self, req: Req) -> int:
        """Slots that `req` is expected to take in all, those of its last round's wrong drafts among them."""
        return req.seq_len + self._ratio.expected(req) + self._limits.slots_per_step - 1

    def _raise_stuck(self) -> None:
        req = self._queues.waiting[0]
        raise RuntimeError(
            f"nothing runs and request {req.rid!r} with {req.seq_len} tokens does not fit: "
            f"pool {self._kv.size}, room {self._kv.room()}, "
            f"free rows {self._kv.req_to_token_pool.available_size()}"
        )

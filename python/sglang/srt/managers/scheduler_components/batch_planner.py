"""Owns the plan of one step: which prompts or chunks are computed, else which requests decode, and who is
pushed back when room ends.

Called by the scheduler once a step. It must not run anything and must not send anything; it moves requests
between the lists of the queues.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.schedule_batch import (
    PrefillPart,
    RequestQueues,
    ScheduledBatch,
    make_decode_batch,
    make_prefill_batch,
)
from sglang.srt.managers.scheduler_components.schedule_policy import (
    NewTokenRatio,
    PrefillBudget,
    count_deferral,
    queue_order,
    requeue,
    waits_for,
)
from sglang.srt.mem_cache.base_prefix_cache import PrefixMatch
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import FinishReason

logger = logging.getLogger(__name__)

#: After the queue's head found no room, so many steps pass before it is looked at again (unless a request
#: comes or goes).
RETRY_STEPS = 8


@dataclass(slots=True)
class Plan:
    """What a step does: a batch to run (or None), requests that ended for want of room, requests that were
    pushed back.
    """

    batch: ScheduledBatch | None = None
    ended: list[Req] = field(default_factory=list)
    retracted: list[Req] = field(default_factory=list)


class BatchPlanner:
    """Prefill goes before decode; a request that does not fit blocks those behind it, so nobody is
    overtaken for ever.
    """

    def __init__(self, queues: RequestQueues, kv: RequestKV, limits: SchedulerLimits) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._device: torch.device = kv.req_to_token_pool.req_to_token.device
        self._ratio = NewTokenRatio(limits.conservativeness)
        self._num_started_ever = 0
        self._refused = (0, 0)
        self._steps_to_retry = 0

    @property
    def new_token_ratio(self) -> float:
        return self._ratio.value

    def settings(self) -> dict[str, float]:
        """Numbers from the environment that decide a plan."""
        return self._ratio.settings()

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return self._device

    @property
    def can_start(self) -> bool:
        """True while somebody waits and a row is left; whether the pool has room shows when it is planned."""
        return bool(self._queues.waiting) and self._queues.num_started < self._limits.max_running_requests

    def plan(self, *, may_start: bool = True) -> Plan:
        """The next step's work. Slots of the batch are allocated when it returns.

        Without `may_start` no waiting request starts; a prompt that is partly computed goes on.
        """
        plan = Plan()
        parts = self._plan_prefill(may_start)
        if parts:
            plan.batch = make_prefill_batch(parts, self._device)
        elif self._queues.running:
            self._plan_decode(plan)
        return plan

    def note_idle(self) -> None:
        """Nothing runs and nothing waits."""
        self._ratio.reset()

    def note_arrival(self, req: Req) -> None:
        """`req` joins the end of the queue."""
        req.passed_over_from = self._num_started_ever
        self._queues.waiting.append(req)

    # --- prefill
    # --------------------------------------------------------------------------------------------------

    def _plan_prefill(self, may_start: bool) -> list[PrefillPart]:
        queues = self._queues
        starts = may_start and bool(queues.waiting)
        if queues.prefilling is None and not starts:
            return []
        budget = self._new_budget()
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

    def _new_budget(self) -> PrefillBudget:
        limits = self._limits
        tokens = limits.max_prefill_tokens
        if limits.chunk_size is not None:
            tokens = min(tokens, limits.chunk_size)
        requests = limits.prefill_max_requests
        return PrefillBudget(
            tokens=tokens,
            requests=limits.max_running_requests if requests is None else requests,
            cuts_prompts=limits.chunk_size is not None,
        )

    def _make_part(self, req: Req, count: int, budget: PrefillBudget) -> PrefillPart:
        """Allocate the next `count` tokens of a request that has a row.

        There is room: a prompt is admitted with all its tokens reserved, and nobody decodes before it is
        complete.
        """
        start, end = req.kv_len, req.kv_len + count
        slots = self._kv.extend(req, end)
        assert slots is not None, "an admitted prompt lost its reserved room"
        budget.spend(count)
        return PrefillPart(req, req.token_ids()[start:end], start, end, slots, end == req.seq_len)

    def _admit(self, parts: list[PrefillPart], budget: PrefillBudget) -> None:
        """Start waiting requests until tokens, requests or room run out; one whose prefix is being computed
        waits for it.
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
        for req in ordered:
            if len(queues.running) + len(parts) >= limits.max_running_requests:
                break
            match = self._kv.match(req)
            if shares:
                leader = waits_for(req, len(match), (part.req for part in parts), self._kv.page_size)
                if leader is not None and count_deferral(req, leader):
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
            queues.waiting = deque(req for req in queues.waiting if req.arrival not in admitted)
        elif not parts and not queues.running:
            self._raise_stuck()

    def _is_still_refused(self) -> bool:
        """True for a few steps after a refusal while nobody came or went: looking again would match prompts
        in vain.
        """
        queues = self._queues
        if self._steps_to_retry == 0 or self._refused != (len(queues.running), len(queues.waiting)):
            return False
        self._steps_to_retry -= 1
        return bool(queues.running)

    def _start(
        self, req: Req, match: PrefixMatch, budget: PrefillBudget, reserved: int, *, first: bool
    ) -> PrefillPart | None:
        """Give a waiting request its row and the slots of its first chunk; None (and nothing changed) when
        it must wait.
        """
        count = budget.take(req.seq_len - len(match), first=first)
        if count == 0 or self._kv.req_to_token_pool.available_size() == 0:
            return None
        # Alone it may start without room for its expected output: it can only end, never wait for others.
        alone = first and not self._queues.running
        target = req.seq_len + (0 if alone else self._ratio.expected(req))
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
        """Room that a started request will still want: the rest of its prompt and its expected output."""
        pages = self._kv.whole_pages
        return pages(req.seq_len + self._ratio.expected(req)) - pages(req.kv_len)

    def _raise_stuck(self) -> None:
        req = self._queues.waiting[0]
        raise RuntimeError(
            f"nothing runs and request {req.rid!r} with {req.seq_len} tokens does not fit: "
            f"pool {self._kv.size}, room {self._kv.room()}, "
            f"free rows {self._kv.req_to_token_pool.available_size()}"
        )

    # --- decode
    # ---------------------------------------------------------------------------------------------------

    def _plan_decode(self, plan: Plan) -> None:
        batch = self._next_token_of_all()
        if batch is None:
            self._push_back(plan)
            if not self._queues.running:
                return
            batch = self._next_token_of_all()
            assert batch is not None, "room was made"
        else:
            self._ratio.decoded()
        plan.batch = batch

    def _next_token_of_all(self) -> ScheduledBatch | None:
        reqs = self._queues.running
        req_pool_indices = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
        lengths = np.array([req.kv_len for req in reqs], dtype=np.int64)
        slots = self._kv.extend_by_one(reqs, req_pool_indices, lengths)
        if slots is None:
            return None
        return make_decode_batch(list(reqs), req_pool_indices, lengths, slots, self._device)

    def _push_back(self, plan: Plan) -> None:
        """The pool is dry: push requests back to the queue, those that lose least first, until the others
        can go on.

        The request with the fewest output tokens goes first; all its pages stay cached until somebody needs
        them. The last one is never pushed back: when even it finds no slot, it ends with `length`.
        """
        queues, before = self._queues, self._ratio.value
        by_loss = sorted(
            queues.running, key=lambda req: (-len(req.output_ids), len(req.prompt_ids), req.arrival)
        )
        while len(by_loss) > 1 and not self._has_room_for_steps(by_loss):
            self._retract(by_loss.pop(), plan)
        kept = {req.arrival for req in by_loss}
        queues.running = [req for req in queues.running if req.arrival in kept]
        requeue(queues.waiting, plan.retracted)
        if plan.retracted:
            self._ratio.retracted(queues.running)
            logger.warning(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, "
                "#new_token_ratio: %.4f -> %.4f",
                len(plan.retracted),
                before,
                self._ratio.value,
            )
        last = queues.running[0]
        if len(queues.running) == 1 and self._kv.room() < self._growth(last, 1):
            self._end_for_want_of_room(last, plan)

    def _has_room_for_steps(self, reqs: list[Req]) -> bool:
        return self._kv.room() >= sum(
            self._growth(req, max(self._ratio.steps_kept_free(req), 1)) for req in reqs
        )

    def _growth(self, req: Req, steps: int) -> int:
        """Tokens of new pages that a running request needs for its next `steps` tokens."""
        pages = self._kv.whole_pages
        return pages(req.kv_len + steps) - pages(req.kv_len)

    def _retract(self, req: Req, plan: Plan) -> None:
        self._kv.release(req, keep=True)
        req.num_retractions += 1
        plan.retracted.append(req)

    def _end_for_want_of_room(self, req: Req, plan: Plan) -> None:
        produced = len(req.output_ids)
        message = (
            f"the KV cache holds {self._kv.size} tokens and this request fills it alone "
            f"({req.num_prompt_tokens} prompt + {produced} output tokens): ended early, "
            "start with a larger --max-total-tokens"
        )
        logger.warning("Request %s: %s", req.rid, message)
        req.finish_reason = FinishReason(type="length", length=produced, message=message)
        self._kv.release(req, keep=True)
        self._queues.running = []
        plan.ended.append(req)

"""Owns the next decode step: a round of every running request, and who is retracted when the pool is full.

Asked by the batch planner when there is no prefill. It must not start a request.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.planning.schedule_policy import NewTokenRatio, requeue
from sglang.srt.managers.scheduler_components.schedule_batch import (
    Plan,
    RequestQueues,
    Riders,
    ScheduledBatch,
    make_decode_batch,
)
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import FinishReason

logger = logging.getLogger(__name__)


class DecodePlanner:
    """Retracts the requests that lose least; the last one is never retracted.

    With a draft a request needs slots for a whole round, `slots_per_step`. The last one goes on in narrow
    rounds of one slot, so that having a draft costs nobody a token.
    """

    def __init__(
        self,
        queues: RequestQueues,
        kv: RequestKV,
        limits: SchedulerLimits,
        ratio: NewTokenRatio,
        device: torch.device,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._ratio = ratio
        self._device = device

    def plan(self) -> Plan:
        """A batch of all running requests; some are retracted first when they do not all find a slot."""
        full = self._limits.slots_per_step
        plan = Plan(batch=self._round_of_all(full))
        if plan.batch is not None:
            self._ratio.decoded()
            return plan
        self._make_room(plan)
        if self._queues.running:
            plan.batch = self._round_of_all(full) or self._round_of_all(1)
            assert plan.batch is not None, "room was made"
        return plan

    def plan_riders(self) -> Riders | None:
        """All running requests, to decode one token in a forward with prompts.

        None where nothing runs or not all find a slot: a decode step then makes room.
        """
        reqs = list(self._queues.running)
        slots = self._kv.reserve(reqs, *_places(reqs), 1) if reqs else None
        if slots is None:
            return None
        self._ratio.decoded()
        return Riders(reqs, slots)

    def _round_of_all(self, slots_per_request: int) -> ScheduledBatch | None:
        reqs = list(self._queues.running)
        rows, lengths = _places(reqs)
        slots = self._kv.reserve(reqs, rows, lengths, slots_per_request)
        if slots is None:
            return None
        return make_decode_batch(
            reqs,
            rows,
            lengths,
            slots,
            self._device,
            slots_per_request=slots_per_request,
            num_recent_ids=self._limits.num_recent_ids,
        )

    def _make_room(self, plan: Plan) -> None:
        """The pool is full: retract requests until the others can go on for a few steps.

        The one with the fewest output tokens goes first; its pages stay cached until somebody needs them.
        When the last one finds no slot for its next token, it ends with `length`.
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
        if len(queues.running) == 1 and self._kv.room() < self._growth(last, last.kv_len + 1):
            self._end_for_want_of_room(last, plan)

    def _has_room_for_steps(self, reqs: list[Req]) -> bool:
        return self._kv.room() >= sum(self._growth(req, self._len_after_steps(req)) for req in reqs)

    def _len_after_steps(self, req: Req) -> int:
        """Slots that `req` has taken once it got the tokens that a retraction keeps room for."""
        steps = max(self._ratio.steps_kept_free(req), 1)
        return req.kv_len + steps + self._limits.slots_per_step - 1

    def _growth(self, req: Req, length: int) -> int:
        """How many tokens of new pages a running request needs for slots up to `length`."""
        pages = self._kv.whole_pages
        return max(pages(length) - pages(req.reserved_len), 0)

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


def _places(reqs: list[Req]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the requests in the table of slots, and how many tokens of each are in the cache."""
    rows = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
    return rows, np.array([req.kv_len for req in reqs], dtype=np.int64)

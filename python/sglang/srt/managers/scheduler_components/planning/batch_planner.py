"""Owns the plan of one step: prompts if there are some, else a decode step, or both in one forward.

Called by the scheduler once a step. It must not run anything and must not send anything; it moves requests
between the queues.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.planning.decode_planner import DecodePlanner
from sglang.srt.managers.scheduler_components.planning.prefill_planner import PrefillPlanner
from sglang.srt.managers.scheduler_components.planning.prompt_pace import LEAST_TOKENS, PromptPace
from sglang.srt.managers.scheduler_components.planning.schedule_policy import NewTokenRatio
from sglang.srt.managers.scheduler_components.schedule_batch import Plan, RequestQueues, make_prefill_batch
from sglang.srt.mem_cache.request_kv import RequestKV


class BatchPlanner:
    """Prefill goes before decode, so that a new request is answered soon.

    With a pace, prompts are cut so that no step lasts long while streams run, and these get a token between
    two steps with prompts; or in the same forward, where they ride.
    """

    def __init__(self, queues: RequestQueues, kv: RequestKV, limits: SchedulerLimits) -> None:
        #: Where batches are made.
        self.device: torch.device = kv.req_to_token_pool.req_to_token.device
        self._queues = queues
        self._ratio = NewTokenRatio(limits.conservativeness)
        self._prefill = PrefillPlanner(queues, kv, limits, self._ratio)
        self._decode = DecodePlanner(queues, kv, limits, self._ratio, self.device)
        self._pace = PromptPace() if limits.chunk_follows_time else None
        self._rides = limits.mixes_decode_in
        self._owes_decode = False

    @property
    def new_token_ratio(self) -> float:
        return self._ratio.value

    def settings(self) -> dict[str, float]:
        """Numbers from the environment that decide a plan."""
        return self._ratio.settings()

    @property
    def can_start(self) -> bool:
        """Whether a waiting request may start, as far as the queues tell."""
        return self._prefill.can_start

    def plan(
        self, *, now: float, may_start: bool, may_prefill: bool = True, may_decode: Callable[[bool], bool]
    ) -> Plan:
        """The work of the step that begins at `now`. Slots of the batch are allocated when it returns.

        Without `may_start` no waiting request starts; a prompt that is partly computed goes on, unless
        `may_prefill` says that this step is for decoding. `may_decode` is asked once, with whether there are
        prompts in this step.
        """
        if self._pace is not None:
            self._pace.begin_step(now)
        plan = self._plan(may_start, may_prefill, may_decode)
        if self._pace is not None and plan.batch is not None:
            self._pace.planned(plan.batch.forward.num_tokens, has_prompt=plan.batch.parts is not None)
        return plan

    def _plan(self, may_start: bool, may_prefill: bool, may_decode: Callable[[bool], bool]) -> Plan:
        num_running = len(self._queues.running)
        most_tokens = None
        if self._pace is not None and num_running:
            most_tokens = max(self._pace.tokens - (num_running if self._rides else 0), LEAST_TOKENS)
            may_prefill = may_prefill and not self._owes_decode
        parts = self._prefill.plan(may_start=may_start, most_tokens=most_tokens) if may_prefill else []
        decodes = may_decode(bool(parts))
        if parts:
            riders = self._decode.plan_riders() if self._rides else None
            self._owes_decode = num_running > 0 and riders is None
            return Plan(batch=make_prefill_batch(parts, self.device, riders))
        if not decodes or not num_running:
            return Plan()
        self._owes_decode = False
        return self._decode.plan()

    def note_idle(self) -> None:
        """Nothing runs and nothing waits."""
        self._ratio.reset()
        self._owes_decode = False
        if self._pace is not None:
            self._pace.forget_step()

    def note_arrival(self, req: Req) -> None:
        """`req` joins the end of the queue."""
        self._prefill.note_arrival(req)

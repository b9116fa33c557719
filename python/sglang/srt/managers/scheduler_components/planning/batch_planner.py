"""Owns the plan of one step: a prefill if there is one, else a decode step of the running requests.

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
from sglang.srt.managers.scheduler_components.planning.schedule_policy import NewTokenRatio
from sglang.srt.managers.scheduler_components.schedule_batch import Plan, RequestQueues, make_prefill_batch
from sglang.srt.mem_cache.request_kv import RequestKV


class BatchPlanner:
    """Prefill goes before decode, so that a new request is answered soon."""

    def __init__(self, queues: RequestQueues, kv: RequestKV, limits: SchedulerLimits) -> None:
        #: Where batches are made.
        self.device: torch.device = kv.req_to_token_pool.req_to_token.device
        self._queues = queues
        self._ratio = NewTokenRatio(limits.conservativeness)
        self._prefill = PrefillPlanner(queues, kv, limits, self._ratio)
        self._decode = DecodePlanner(queues, kv, limits, self._ratio, self.device)

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

    def plan(self, *, may_start: bool, may_prefill: bool = True, may_decode: Callable[[bool], bool]) -> Plan:
        """The next step's work. Slots of the batch are allocated when it returns.

        Without `may_start` no waiting request starts; a prompt that is partly computed goes on, unless
        `may_prefill` says that this step is for decoding. `may_decode` is asked once, with whether there are
        prompts in this step.
        """
        parts = self._prefill.plan(may_start=may_start) if may_prefill else []
        decodes = may_decode(bool(parts))
        if parts:
            return Plan(batch=make_prefill_batch(parts, self.device))
        return self._decode.plan() if decodes and self._queues.running else Plan()

    def note_idle(self) -> None:
        """Nothing runs and nothing waits."""
        self._ratio.reset()

    def note_arrival(self, req: Req) -> None:
        """`req` joins the end of the queue."""
        self._prefill.note_arrival(req)

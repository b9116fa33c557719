"""Owns the vote of the attention-DP replicas on when prompts start, so that they start together.

Asked by the scheduler before planning: a prefill on one replica makes all others wait for it in the forward.
It must not hold back a prompt that is partly computed, nor anything without attention data parallelism.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from sglang.srt.managers.scheduler_components.dp_attn import gather_from_replicas
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule

logger = logging.getLogger(__name__)


class Vote(NamedTuple):
    """What one replica could do in this step."""

    can_start: int  # a request waits and one more may run
    is_in_prompt: int  # a prompt is partly computed: this replica runs a prefill whatever the vote says
    is_hungry: int  # it could start, and uses less of its pool than the watermark


class PrefillDelayer:
    """Holds prompts back while only some replicas could start one, for at most `max_passes` steps."""

    def __init__(self, *, max_passes: int, low_watermark: float | None) -> None:
        self._max_passes = max_passes
        self._low_watermark = low_watermark
        self._passes = 0
        self.num_delayed_steps = 0

    @classmethod
    def from_published(cls, *, warns: bool = True) -> PrefillDelayer | None:
        """The delayer of this deployment, or None when there is nothing to vote on (logged if `warns`)."""
        schedule = get_schedule()
        if not schedule.enable_prefill_delayer:
            return None
        if get_parallel().attn_dp_size == 1:
            if warns:
                logger.warning(
                    "enable_prefill_delayer has no effect without attention data parallelism (--attn-dp-size)"
                )
            get_context().override("prefill_delayer", enable_prefill_delayer=False)
            return None
        return cls(
            max_passes=schedule.prefill_delayer_max_delay_passes,
            low_watermark=schedule.prefill_delayer_token_usage_low_watermark,
        )

    def may_start(self, *, can_start: bool, is_in_prompt: bool, token_usage: float) -> bool:
        """Whether waiting requests may start now: the same answer on every rank of the tensor group.

        All of them ask once a step.
        """
        low = self._low_watermark
        is_hungry = can_start and low is not None and token_usage < low
        mine = Vote(int(can_start), int(is_in_prompt), int(is_hungry))
        return self._decide([Vote(*row) for row in gather_from_replicas(Vote._fields, mine)])

    def _decide(self, votes: list[Vote]) -> bool:
        ready = sum(vote.can_start or vote.is_in_prompt for vote in votes)
        together = ready in (0, len(votes))
        # A prefill that runs anyway already costs the others their decode step: join it.
        joined = any(vote.is_in_prompt or vote.is_hungry for vote in votes)
        if together or joined or self._passes >= self._max_passes:
            self._passes = 0
            return True
        self._passes += 1
        self.num_delayed_steps += 1
        return False

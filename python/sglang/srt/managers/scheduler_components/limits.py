"""Owns the numbers that bound the scheduler, read once from the published configuration and the worker.

Read by the scheduler's parts. It must not choose a default: an unresolved flag is an error.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_components.worker import Worker
from sglang.srt.runtime_context import (
    get_context,
    get_memory,
    get_observability,
    get_parallel,
    get_schedule,
    get_serving,
)
from sglang.srt.runtime_context.widths import requests_per_replica

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Everything is in tokens unless the name says otherwise. `chunk_size` None: prompts are not cut.

    While streams run, pieces of prompts are as small as `chunk_follows_time` makes them; with
    `mixes_decode_in` the streams decode in the forwards of prompts.
    `slots_per_step` and `num_recent_ids` are the worker's.
    """

    pool_size: int
    page_size: int
    context_len: int
    vocab_size: int
    slots_per_step: int
    num_recent_ids: int
    max_running_requests: int
    max_queued_requests: int | None
    chunk_size: int | None
    chunk_follows_time: bool
    mixes_decode_in: bool
    max_prefill_tokens: int
    prefill_max_requests: int | None
    schedule_policy: str
    conservativeness: float
    disable_radix_cache: bool
    eviction_policy: str
    stream_interval: int
    hidden_stream_interval: int
    decode_log_interval: int
    waiting_timeout_s: float
    running_timeout_s: float

    @classmethod
    def from_published(cls, worker: Worker) -> SchedulerLimits:
        """The limits of this deployment; `RuntimeError` names a flag that resolution should have filled."""
        schedule, memory = get_schedule(), get_memory()
        chunk = schedule.chunked_prefill_size
        if chunk is None:
            raise RuntimeError(
                "chunked_prefill_size is not resolved: run resolve() on the record before it is published, "
                "or give a number (-1 switches chunking off)"
            )
        if chunk == 0 or chunk < -1:
            raise ValueError(f"chunked_prefill_size: must be -1 (off) or at least 1, got {chunk}")
        rows = worker.req_to_token_pool.size
        running = rows
        if schedule.max_running_requests is not None:
            share = requests_per_replica(schedule.max_running_requests, get_parallel().attn_dp_size)
            running = min(share, rows)
        return cls(
            pool_size=worker.token_to_kv_pool_allocator.size,
            page_size=worker.page_size,
            context_len=worker.context_len,
            vocab_size=worker.vocab_size,
            slots_per_step=worker.slots_per_step,
            num_recent_ids=worker.num_recent_ids,
            max_running_requests=running,
            max_queued_requests=schedule.max_queued_requests,
            chunk_size=None if chunk == -1 else chunk,
            chunk_follows_time=schedule.enable_dynamic_chunking,
            mixes_decode_in=_mixes_decode_in(worker),
            max_prefill_tokens=schedule.max_prefill_tokens,
            prefill_max_requests=schedule.prefill_max_requests,
            schedule_policy=schedule.schedule_policy,
            conservativeness=schedule.schedule_conservativeness,
            disable_radix_cache=memory.disable_radix_cache,
            eviction_policy=memory.radix_eviction_policy,
            stream_interval=get_serving().stream_interval,
            hidden_stream_interval=envs.SGLANG_FORCE_STREAM_INTERVAL.get(),
            decode_log_interval=get_observability().decode_log_interval,
            waiting_timeout_s=envs.SGLANG_REQ_WAITING_TIMEOUT.get(),
            running_timeout_s=envs.SGLANG_REQ_RUNNING_TIMEOUT.get(),
        )

    @property
    def has_draft(self) -> bool:
        """Whether decode steps are verify rounds, which may give several tokens a request."""
        return self.slots_per_step > 1

    def override_published(self) -> None:
        """Publish the numbers that the pool allows, so that `/server_info` and `/placement` show them.

        `max_running_requests` counts all attention-DP replicas.
        """
        schedule = get_schedule()
        allowed = {
            "max_total_tokens": self.pool_size,
            "max_running_requests": self.max_running_requests * get_parallel().attn_dp_size,
        }
        changed = {name: value for name, value in allowed.items() if getattr(schedule, name) != value}
        if changed:
            get_context().override("scheduler", **changed)

    def settings(self) -> dict[str, object]:
        """Every limit by name, for ranks that must decide alike."""
        return asdict(self)

    def summary(self) -> str:
        """The line that log readers search for once the pool is there."""
        return (
            f"max_total_num_tokens={self.pool_size}, chunked_prefill_size={self.chunk_size or -1}, "
            f"max_prefill_tokens={self.max_prefill_tokens}, "
            f"max_running_requests={self.max_running_requests}, "
            f"context_len={self.context_len}, enable_dynamic_chunking={self.chunk_follows_time}, "
            f"enable_mixed_chunk={self.mixes_decode_in}"
        )


def _mixes_decode_in(worker: Worker) -> bool:
    """Whether requests decode in the forwards of prompts: rounds of a draft cannot."""
    if not get_schedule().enable_mixed_chunk or worker.slots_per_step == 1:
        return get_schedule().enable_mixed_chunk
    if get_parallel().is_attn_tp_leader:
        logger.warning(
            "enable_mixed_chunk has no effect with speculative decoding: prompts and verify rounds take turns"
        )
    get_context().override("scheduler", enable_mixed_chunk=False)
    return False

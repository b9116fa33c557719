"""Owns the scheduler's counters: how much runs, waits and is cached, how fast, and the log lines that say so.

Read by `/server_info` and by people who watch the log. No plan may depend on them: they contain clock
readings.
"""

from __future__ import annotations

import logging
import time

from sglang.srt.batch.forward_batch import GenerationBatchResult
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.schedule_batch import PrefillPart, RequestQueues, ScheduledBatch
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import SpecCounts

logger = logging.getLogger(__name__)


class SchedulerLoad:
    """Counts what happened to this replica since the start.

    Logs one line per prefill batch and one every `decode_log_interval` decode batches, on the leader of the
    ranks that hold the same requests.
    """

    def __init__(
        self,
        queues: RequestQueues,
        kv: RequestKV,
        limits: SchedulerLimits,
        streamer: OutputStreamer,
        *,
        dp_rank: int = 0,
        is_leader: bool = True,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._streamer = streamer
        self._dp_rank = dp_rank
        self._log_level = logging.INFO if is_leader else logging.DEBUG
        self.num_received = 0
        self.num_generated_tokens = 0
        self.num_idle_forwards = 0
        self.num_prefill_forwards = 0
        self.num_decode_forwards = 0
        self.num_retractions = 0
        self._spec = SpecCounts()
        self._spec_since_log = SpecCounts()
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self.last_gen_throughput = 0.0
        self._decoded_since_log = 0
        self._decode_log_time = time.perf_counter()
        self._prefill_log_time = self._decode_log_time

    def count(self, batch: ScheduledBatch, result: GenerationBatchResult, num_tokens: int) -> None:
        """A forward over `batch` has been processed, and its requests got `num_tokens` of it."""
        self.num_generated_tokens += num_tokens
        if batch.parts is None:
            self.num_decode_forwards += 1
            self._decoded_since_log += num_tokens
            for correct in result.num_correct_drafts or ():
                self._spec.add_round(correct, result.num_proposed_drafts)
                self._spec_since_log.add_round(correct, result.num_proposed_drafts)
            if self.num_decode_forwards % self._limits.decode_log_interval == 0:
                self._log_decode(replayed=result.replayed)
        else:
            self.num_prefill_forwards += 1
            self._log_prefill(batch.parts)

    def state(self, new_token_ratio: float) -> dict[str, object]:
        """Everything as plain values (`internal_states` of `/server_info`)."""
        used = self._kv.used()
        hit_rate = self._cached_prompt_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        state: dict[str, object] = {
            "dp_rank": self._dp_rank,
            "num_requests_received": self.num_received,
            "num_requests_finished": self._streamer.num_ended,
            "num_generated_tokens": self.num_generated_tokens,
            "num_running_reqs": self._queues.num_started,
            "num_queue_reqs": len(self._queues.waiting),
            "num_used_tokens": used,
            "num_cached_tokens": self._kv.prefix_cache.total_size(),
            "token_usage": used / self._kv.size,
            "max_total_num_tokens": self._kv.size,
            "max_running_requests": self._limits.max_running_requests,
            "last_gen_throughput": self.last_gen_throughput,
            "cache_hit_rate": hit_rate,
            "forward_ct": self.num_prefill_forwards + self.num_decode_forwards,
            "forward_ct_prefill": self.num_prefill_forwards,
            "forward_ct_decode": self.num_decode_forwards,
            "forward_ct_idle": self.num_idle_forwards,
            "num_retractions": self.num_retractions,
            "new_token_ratio": new_token_ratio,
            "avg_spec_accept_length": _accept_length(self._spec),
        }
        if self._limits.has_draft:
            state |= {
                "spec_verify_ct": self._spec.num_rounds,
                "spec_num_correct_drafts": self._spec.num_correct_drafts,
                "spec_num_proposed_drafts": self._spec.num_proposed_drafts,
            }
        return state

    def _log_prefill(self, parts: list[PrefillPart]) -> None:
        now = time.perf_counter()
        elapsed, self._prefill_log_time = now - self._prefill_log_time, now
        new = sum(part.end - part.start for part in parts)
        # A request's hit is counted with its first chunk.
        cached = sum(part.start for part in parts if part.start == part.req.cached_tokens)
        self._prompt_tokens += new + cached
        self._cached_prompt_tokens += cached
        logger.log(
            self._log_level,
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, input throughput (token/s): %.2f",
            len(parts),
            new,
            cached,
            self._kv.used() / self._kv.size,
            self._queues.num_started,
            len(self._queues.waiting),
            new / max(elapsed, 1e-9),
        )

    def _log_decode(self, *, replayed: bool) -> None:
        now = time.perf_counter()
        self.last_gen_throughput = self._decoded_since_log / max(now - self._decode_log_time, 1e-9)
        self._decode_log_time, self._decoded_since_log = now, 0
        used = self._kv.used()
        logger.log(
            self._log_level,
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %scuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            len(self._queues.running),
            used,
            used / self._kv.size,
            self._acceptance_since_log(),
            replayed,
            self.last_gen_throughput,
            len(self._queues.waiting),
        )

    def _acceptance_since_log(self) -> str:
        spec, self._spec_since_log = self._spec_since_log, SpecCounts()
        if not spec.num_rounds:
            return ""
        rate = spec.num_correct_drafts / max(spec.num_proposed_drafts, 1)
        proposed = spec.num_proposed_drafts / spec.num_rounds
        return f"accept len: {_accept_length(spec):.2f}, accept rate: {rate:.2f}, draft len: {proposed:.2f}, "


def _accept_length(spec: SpecCounts) -> float | None:
    """Tokens that a round emits for a request, on average: its correct drafts and the target's own."""
    return 1 + spec.num_correct_drafts / spec.num_rounds if spec.num_rounds else None

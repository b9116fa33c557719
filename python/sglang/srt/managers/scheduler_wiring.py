"""Owns how the scheduler's parts are built from a worker, a tokenizer, a channel and the published settings.

Called once by the scheduler. It is the only place that knows which part needs which; it must not run
anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers.scheduler_components.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.scheduler_components.dp_attn import DpAttnSync
from sglang.srt.managers.scheduler_components.group_channel import GroupChannel
from sglang.srt.managers.scheduler_components.invariant_checker import InvariantChecker
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.load import SchedulerLoad
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.planning.batch_planner import BatchPlanner
from sglang.srt.managers.scheduler_components.planning.prefill_delayer import PrefillDelayer
from sglang.srt.managers.scheduler_components.request_receiver import RequestReceiver
from sglang.srt.managers.scheduler_components.schedule_batch import RequestQueues
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher, StopTokenizer, end_ids_of_model
from sglang.srt.managers.scheduler_components.worker import Worker
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.evict_policy import make_evict_policy
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.channel import SchedulerChannel
from sglang.srt.runtime_context import get_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """What one scheduler consists of. `dp_attn` and `delayer` are None where a replica has nobody to ask."""

    dp_rank: int
    limits: SchedulerLimits
    group: GroupChannel
    dp_attn: DpAttnSync | None
    delayer: PrefillDelayer | None
    queues: RequestQueues
    kv: RequestKV
    planner: BatchPlanner
    receiver: RequestReceiver
    processor: BatchResultProcessor
    streamer: OutputStreamer
    load: SchedulerLoad
    invariants: InvariantChecker


def build_parts(
    worker: Worker, tokenizer: StopTokenizer | None, channel: SchedulerChannel | None
) -> SchedulerParts:
    """The parts of one rank's scheduler; refuses ranks of one group whose limits differ."""
    limits = SchedulerLimits.from_published(worker)
    limits.override_published()
    group = GroupChannel(channel)
    dp_rank = get_parallel().replica_rank
    queues = RequestQueues()
    kv = RequestKV(worker.req_to_token_pool, worker.token_to_kv_pool_allocator, _make_prefix_cache(limits))
    streamer = OutputStreamer(group.send, limits, dp_rank=dp_rank)
    planner = BatchPlanner(queues, kv, limits)
    stop_matcher = StopMatcher(
        tokenizer,
        eos_token_ids=end_ids_of_model(tokenizer, worker.model_config),
        vocab_size=limits.vocab_size,
        context_len=limits.context_len,
    )
    processor = BatchResultProcessor(queues, kv, streamer, stop_matcher)
    parts = SchedulerParts(
        dp_rank=dp_rank,
        limits=limits,
        group=group,
        dp_attn=DpAttnSync() if get_parallel().attn_dp_size > 1 else None,
        delayer=PrefillDelayer.from_published(warns=group.is_leader),
        queues=queues,
        kv=kv,
        planner=planner,
        receiver=RequestReceiver(
            queues,
            limits=limits,
            enqueue=planner.note_arrival,
            processor=processor,
            streamer=streamer,
            stop_matcher=stop_matcher,
        ),
        processor=processor,
        streamer=streamer,
        load=SchedulerLoad(queues, kv, limits, streamer, dp_rank=dp_rank, is_leader=group.is_leader),
        invariants=InvariantChecker(queues, kv),
    )
    group.require_equal("scheduler's limits", limits.settings() | planner.settings())
    return parts


def _make_prefix_cache(limits: SchedulerLimits) -> BasePrefixCache:
    if limits.disable_radix_cache:
        return ChunkCache(limits.page_size)
    return RadixCache(limits.page_size, make_evict_policy(limits.eviction_policy))

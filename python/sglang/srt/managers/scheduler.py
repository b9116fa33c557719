"""Owns the loop of one rank: receive, plan, run, process, stream out, and rest when there is nothing to do.

Started by the rank process with a worker and (a leader of an attention-TP group) a channel; tests drive it
with `step`. It must not know how any of its parts work, and it never swallows an exception: a step that fails
for no single request's sake ends the rank.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, GenerationBatchResult
from sglang.srt.managers.scheduler_components.batch_planner import BatchPlanner, Plan
from sglang.srt.managers.scheduler_components.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.scheduler_components.dp_attn import Agreement, DpAttnSync
from sglang.srt.managers.scheduler_components.group_channel import Channel, GroupChannel
from sglang.srt.managers.scheduler_components.invariant_checker import InvariantChecker
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.load import SchedulerLoad
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.placement_report import PlacementReporter
from sglang.srt.managers.scheduler_components.prefill_delayer import PrefillDelayer
from sglang.srt.managers.scheduler_components.request_receiver import RequestReceiver
from sglang.srt.managers.scheduler_components.schedule_batch import RequestQueues
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher, end_ids_of_model
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.evict_policy import make_evict_policy
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import (
    AbortReq,
    DispatchedReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    GetPlacementReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.platforms import available_memory_bytes
from sglang.srt.runtime_context import assert_role, get_parallel

logger = logging.getLogger(__name__)

#: An idle loop turns at least this often, so that its age tells whether it lives.
IDLE_WAIT_S = 1.0


class Worker(Protocol):
    """What the scheduler needs of whoever runs the model."""

    model_config: Any
    page_size: int
    vocab_size: int
    context_len: int
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any

    def forward_batch_generation(self, batch: ForwardBatch) -> GenerationBatchResult: ...


class Scheduler:
    """Continuous batching over one worker. Configuration is read from the published namespaces.

    `channel` is None on the ranks that hold the same requests as their leader: they run the same loop on
    what the leader hears, so that all of them plan the same batches.
    """

    def __init__(
        self, worker: Worker, *, tokenizer: Any, channel: Channel | None, heartbeat: Any = None
    ) -> None:
        assert_role("scheduler")
        limits = SchedulerLimits.from_published(worker)
        limits.make_known()
        self.worker = worker
        self.channel = channel
        self.group = group = GroupChannel(channel)
        self.dp_rank = get_parallel().replica_rank
        self._dp_attn = DpAttnSync() if get_parallel().attn_dp_size > 1 else None
        self._delayer = PrefillDelayer.from_published(warns=group.is_leader)
        self._heartbeat = heartbeat
        self._stopping = False
        self.queues = queues = RequestQueues()
        self.kv = kv = RequestKV(
            worker.req_to_token_pool, worker.token_to_kv_pool_allocator, _make_prefix_cache(limits)
        )
        self.streamer = OutputStreamer(group.send, limits, dp_rank=self.dp_rank)
        self.planner = BatchPlanner(queues, kv, limits)
        stop_matcher = StopMatcher(
            tokenizer,
            eos_token_ids=end_ids_of_model(tokenizer, worker.model_config),
            vocab_size=limits.vocab_size,
            context_len=limits.context_len,
        )
        self.processor = BatchResultProcessor(queues, kv, self.streamer, stop_matcher)
        self.receiver = RequestReceiver(
            queues,
            limits=limits,
            planner=self.planner,
            processor=self.processor,
            streamer=self.streamer,
            stop_matcher=stop_matcher,
        )
        self.load = SchedulerLoad(
            queues, kv, limits, self.streamer, dp_rank=self.dp_rank, is_leader=group.is_leader
        )
        self.invariants = InvariantChecker(queues, kv)
        group.require_equal("scheduler's limits", limits.settings() | self.planner.settings())
        logger.info("%s, available_cpu_mem=%.2f GB", limits.summary(), available_memory_bytes() / 2**30)

    def run_event_loop(self) -> None:
        """Turn until a `ShutdownReq` comes. An exception leaves the loop: the rank process reports it and
        ends.
        """
        while not self._stopping:
            worked = self.step()
            if self._heartbeat is not None:
                self._heartbeat.turn()
            if not worked and not self._stopping and (self._dp_attn is None or self._dp_attn.may_rest):
                self.group.rest(IDLE_WAIT_S)

    def step(self) -> bool:
        """One turn; True while requests are left, with attention DP on any replica of the tensor group: all
        its ranks turn together and get the same answer.
        """
        now, messages = self.group.receive()
        for message in messages:
            self._handle(message, now)
        plan = self._plan(now)
        agreement = None if self._dp_attn is None else self._agree(self._dp_attn, plan)
        if self._stopping:
            return False
        self._take_step(plan, None if agreement is None else agreement.step)
        self.streamer.flush()
        if self.queues.is_idle:
            self.planner.note_idle()
            self.invariants.check_idle()
        return not self.queues.is_idle if agreement is None else agreement.has_requests

    def _plan(self, now: float) -> Plan:
        """This replica's batch. A rank that is about to leave votes all the same: the others wait for it."""
        may_start = self._delayer is None or self._delayer.may_start(
            can_start=self.planner.can_start,
            is_in_prompt=self.queues.prefilling is not None,
            token_usage=self.kv.used() / self.kv.size,
        )
        if self._stopping:
            return Plan()
        self.receiver.expire(now)
        plan = self.planner.plan(may_start=may_start)
        self.load.num_retractions += len(plan.retracted)
        for req in plan.ended:
            self.streamer.collect(req)
        return plan

    def _agree(self, dp_attn: DpAttnSync, plan: Plan) -> Agreement:
        agreement = dp_attn.agree(
            stopping=self._stopping,
            # A request whose prompt this batch completes is in no list of the queues until it is processed.
            has_requests=plan.batch is not None or not self.queues.is_idle,
            batch=None if plan.batch is None else plan.batch.forward,
        )
        self._stopping = agreement.stopping
        return agreement

    def _take_step(self, plan: Plan, dp_step: DpStep | None) -> None:
        """The forward of this turn; with nothing planned here, this replica's part of the others' forward."""
        batch = plan.batch
        if batch is not None:
            batch.forward.dp_step = dp_step
            result = self._run(batch.forward)
            self.processor.process(batch, result)
            self.load.count(batch, result)
        elif dp_step is not None:
            self._run(ForwardBatch.idle(dp_step, self.planner.device))
            self.load.num_idle_forwards += 1

    def _run(self, forward: ForwardBatch) -> GenerationBatchResult:
        if self._heartbeat is None:
            return self.worker.forward_batch_generation(forward)
        self._heartbeat.forward_begin()
        try:
            return self.worker.forward_batch_generation(forward)
        finally:
            self._heartbeat.forward_end()

    def _handle(self, message: Any, now: float) -> None:
        if self._dp_attn is not None:
            self._dp_attn.count_received(message)
        match message:
            case TokenizedGenerateReqInput():
                self.load.num_received += 1
                self.receiver.accept(message, now)
            case AbortReq():
                self.receiver.abort(message)
            case FlushCacheReqInput():
                self.group.send(self._flush_cache(message))
            case GetInternalStateReq():
                state = self.load.state(self.planner.new_token_ratio)
                self.group.send(
                    GetInternalStateReqOutput(call_id=message.call_id, state=state, dp_rank=self.dp_rank)
                )
            case GetPlacementReq():
                self.group.send(PlacementReporter().report(message.call_id))
            case DispatchedReq() if self._dp_attn is not None:
                pass  # counted above
            case ShutdownReq():
                self._stopping = True
            case _:
                raise RuntimeError(
                    f"the scheduler got a message that is not meant for it: {type(message).__name__}"
                )

    def _flush_cache(self, message: FlushCacheReqInput) -> FlushCacheReqOutput:
        queues = self.queues
        if not queues.is_idle:
            return FlushCacheReqOutput(
                call_id=message.call_id,
                success=False,
                dp_rank=self.dp_rank,
                message=(
                    f"the cache is in use: {queues.num_started} requests run and {len(queues.waiting)} wait; "
                    "let them end or abort them first"
                ),
            )
        self.kv.flush()
        logger.info("Cache flushed")
        return FlushCacheReqOutput(call_id=message.call_id, success=True, dp_rank=self.dp_rank)


def _make_prefix_cache(limits: SchedulerLimits) -> BasePrefixCache:
    if limits.disable_radix_cache:
        return ChunkCache(limits.page_size)
    return RadixCache(limits.page_size, make_evict_policy(limits.eviction_policy))

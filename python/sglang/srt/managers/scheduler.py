"""Owns the loop of one rank: receive, plan, run, process, stream out, and rest when there is nothing to do.

Started by the rank process with a worker and a channel; tests drive it with `step`. It must not know how
any of its parts work, and it never swallows an exception: a step that fails for no single request's sake
ends the rank.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
from sglang.srt.managers.schedule_batch import Roster, ScheduledBatch
from sglang.srt.managers.scheduler_components.batch_planner import BatchPlanner
from sglang.srt.managers.scheduler_components.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.scheduler_components.invariant_checker import InvariantChecker
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.managers.scheduler_components.load import SchedulerLoad
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.request_receiver import RequestReceiver
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher, end_ids_of_model
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.evict_policy import make_evict_policy
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_kv import RequestKV
from sglang.srt.messages.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.platforms.cpu import available_memory_bytes

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


class Channel(Protocol):
    """Where requests come from and answers go."""

    def recv_all(self) -> list[Any]: ...

    def wait(self, timeout_s: float) -> Any: ...

    def send(self, message: Any) -> Any: ...


class Scheduler:
    """Continuous batching over one worker. Configuration is read from the published namespaces."""

    def __init__(self, worker: Worker, *, tokenizer: Any, channel: Channel, heartbeat: Any = None) -> None:
        limits = SchedulerLimits.from_published(worker)
        self.worker = worker
        self.channel = channel
        self._heartbeat = heartbeat
        self._stopping = False
        self.roster = roster = Roster()
        self.kv = kv = RequestKV(
            worker.req_to_token_pool, worker.token_to_kv_pool_allocator, _make_prefix_cache(limits)
        )
        self.streamer = OutputStreamer(channel.send, limits)
        self.planner = BatchPlanner(roster, kv, limits)
        stop_matcher = StopMatcher(
            tokenizer,
            eos_token_ids=end_ids_of_model(tokenizer, worker.model_config),
            vocab_size=limits.vocab_size,
            context_len=limits.context_len,
        )
        self.processor = BatchResultProcessor(roster, kv, self.streamer, stop_matcher)
        self.receiver = RequestReceiver(
            roster,
            limits=limits,
            planner=self.planner,
            processor=self.processor,
            streamer=self.streamer,
            stop_matcher=stop_matcher,
        )
        self.load = SchedulerLoad(roster, kv, limits)
        self.invariants = InvariantChecker(roster, kv)
        logger.info("%s, available_cpu_mem=%.2f GB", limits.summary(), available_memory_bytes() / 2**30)

    def run_event_loop(self) -> None:
        """Turn until a `ShutdownReq` comes. An exception leaves the loop: the rank process reports it and
        ends.
        """
        while not self._stopping:
            worked = self.step()
            if self._heartbeat is not None:
                self._heartbeat.turn()
            if not worked and not self._stopping:
                self.channel.wait(IDLE_WAIT_S)

    def step(self) -> bool:
        """One turn; True while requests are left."""
        for message in self.channel.recv_all():
            self._handle(message)
        if self._stopping:
            return False
        self.receiver.expire()
        plan = self.planner.plan()
        self.load.num_retractions += len(plan.retracted)
        for req in plan.ended:
            self.streamer.collect(req)
        if plan.batch is not None:
            self.processor.process(plan.batch, self._run(plan.batch))
            self.load.count(plan.batch)
        self.streamer.flush()
        if not self.roster.is_idle:
            return True
        self.planner.note_idle()
        self.invariants.check_idle()
        return False

    def _run(self, batch: ScheduledBatch) -> GenerationBatchResult:
        if self._heartbeat is None:
            return self.worker.forward_batch_generation(batch.forward)
        self._heartbeat.forward_begin()
        try:
            return self.worker.forward_batch_generation(batch.forward)
        finally:
            self._heartbeat.forward_end()

    def _handle(self, message: Any) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self.receiver.accept(message)
            case AbortReq():
                self.receiver.abort(message)
            case FlushCacheReqInput():
                self.channel.send(self._flush_cache(message))
            case GetInternalStateReq():
                state = self.load.state(self.planner.new_token_ratio)
                self.channel.send(GetInternalStateReqOutput(call_id=message.call_id, state=state))
            case ShutdownReq():
                self._stopping = True
            case _:
                raise RuntimeError(
                    f"the scheduler got a message that is not meant for it: {type(message).__name__}"
                )

    def _flush_cache(self, message: FlushCacheReqInput) -> FlushCacheReqOutput:
        roster = self.roster
        if not roster.is_idle:
            return FlushCacheReqOutput(
                call_id=message.call_id,
                success=False,
                message=(
                    f"the cache is in use: {roster.num_started} requests run and {len(roster.waiting)} wait; "
                    "let them end or abort them first"
                ),
            )
        self.kv.flush()
        logger.info("Cache flushed")
        return FlushCacheReqOutput(call_id=message.call_id, success=True)


def _make_prefix_cache(limits: SchedulerLimits) -> BasePrefixCache:
    if limits.disable_radix_cache:
        return ChunkCache(limits.page_size)
    return RadixCache(limits.page_size, make_evict_policy(limits.eviction_policy))

"""Owns the loop of one rank: receive, plan, run, process, stream out, and wait when there is nothing to do.

Started by the rank process with a worker and (a leader of an attention-TP group) a channel; tests call
`step`. It must not know how its parts work, and it swallows no exception: a step that fails for no single
request's sake ends the rank.
"""

from __future__ import annotations

import logging
from typing import Protocol

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, GenerationBatchResult
from sglang.srt.managers.scheduler_components.dp_attn import Agreement, DpAttnSync
from sglang.srt.managers.scheduler_components.placement_report import report_placement
from sglang.srt.managers.scheduler_components.schedule_batch import Plan
from sglang.srt.managers.scheduler_components.stop_matcher import StopTokenizer
from sglang.srt.managers.scheduler_components.worker import Worker
from sglang.srt.managers.scheduler_wiring import build_parts
from sglang.srt.messages.channel import SchedulerChannel
from sglang.srt.messages.io_struct import (
    AbortReq,
    DispatchedReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    GetPlacementReq,
    Message,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.platforms import available_memory_bytes
from sglang.srt.runtime_context import assert_role

logger = logging.getLogger(__name__)

#: An idle loop steps at least this often, so that its age tells whether it lives.
IDLE_WAIT_S = 1.0


class Pulse(Protocol):
    """How the loop shows the server process that it lives; a running forward may take longer than a step."""

    def beat(self) -> None: ...

    def forward_begin(self) -> None: ...

    def forward_end(self) -> None: ...


class Scheduler:
    """Continuous batching over one worker. Configuration is read from the published namespaces.

    `channel` is None on the ranks that hold the same requests as their leader: they run the same loop on
    what the leader receives, so that all of them plan the same batches.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        tokenizer: StopTokenizer | None,
        channel: SchedulerChannel | None,
        heartbeat: Pulse | None = None,
    ) -> None:
        assert_role("scheduler")
        parts = build_parts(worker, tokenizer, channel)
        self.worker = worker
        self.channel = channel
        self.dp_rank = parts.dp_rank
        self.group = parts.group
        self.queues = parts.queues
        self.kv = parts.kv
        self.planner = parts.planner
        self.receiver = parts.receiver
        self.processor = parts.processor
        self.streamer = parts.streamer
        self.load = parts.load
        self.invariants = parts.invariants
        self._dp_attn = parts.dp_attn
        self._has_draft = parts.limits.has_draft
        self._delayer = parts.delayer
        self._heartbeat = heartbeat
        self._stopping = False
        memory = available_memory_bytes() / 2**30
        logger.info("%s, available_cpu_mem=%.2f GB", parts.limits.summary(), memory)

    def run_event_loop(self) -> None:
        """Step until a `ShutdownReq` comes; the rank process reports an exception that ends the loop."""
        while not self._stopping:
            worked = self.step()
            if self._heartbeat is not None:
                self._heartbeat.beat()
            if not worked and not self._stopping and (self._dp_attn is None or self._dp_attn.may_rest):
                self.group.rest(IDLE_WAIT_S)

    def step(self) -> bool:
        """One round of the loop; True while requests are left.

        With attention DP all ranks of the tensor group step together and get the same answer: True while any
        replica has requests.
        """
        now, messages = self.group.receive()
        for message in messages:
            self._handle(message, now)
        self.receiver.end_aborted()
        plan = self._plan(now)
        agreement = None if self._dp_attn is None else self._agree(self._dp_attn, plan)
        if self._stopping:
            return False
        self._run_plan(plan, None if agreement is None else agreement.step)
        self.streamer.flush()
        if self.queues.is_idle:
            self.planner.note_idle()
            self.invariants.check_idle()
        return not self.queues.is_idle if agreement is None else agreement.has_requests

    def _plan(self, now: float) -> Plan:
        """This replica's batch. A rank that is about to stop votes all the same: the others wait for it."""
        may_start = self._delayer is None or self._delayer.may_start(
            can_start=self.planner.can_start,
            is_in_prompt=self.queues.prefilling is not None,
            token_usage=self.kv.used() / self.kv.size,
        )
        if self._stopping:
            self._may_decode(has_prompt=False)
            return Plan()
        self.receiver.expire(now)
        prompts_wait = self._dp_attn is not None and self._dp_attn.prompts_wait
        plan = self.planner.plan(
            now=now, may_start=may_start, may_prefill=not prompts_wait, may_decode=self._may_decode
        )
        self.load.num_retractions += len(plan.retracted)
        for req in plan.ended:
            self.streamer.collect(req)
        return plan

    def _may_decode(self, has_prompt: bool) -> bool:
        """Whether this replica may decode in this step, with `has_prompt` what it has planned so far."""
        if self._dp_attn is None or not self._has_draft:
            return not has_prompt
        return self._dp_attn.may_decode(has_prompt=has_prompt, has_running=bool(self.queues.running))

    def _agree(self, dp_attn: DpAttnSync, plan: Plan) -> Agreement:
        agreement = dp_attn.agree(
            stopping=self._stopping,
            # A request whose prompt this batch completes is in no queue until the batch is processed.
            has_requests=plan.batch is not None or not self.queues.is_idle,
            batch=None if plan.batch is None else plan.batch.forward,
        )
        self._stopping = agreement.stopping
        return agreement

    def _run_plan(self, plan: Plan, dp_step: DpStep | None) -> None:
        """The planned forward; with nothing planned here, this replica's part of the others' forward."""
        batch = plan.batch
        if batch is not None:
            batch.forward.dp_step = dp_step
            result = self._run(batch.forward)
            num_tokens = self.processor.process(batch, result)
            self.load.count(batch, result, num_tokens)
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

    def _handle(self, message: Message, now: float) -> None:
        if self._dp_attn is not None:
            self._dp_attn.count_received(message)
        if not isinstance(message, TokenizedGenerateReqInput | AbortReq):
            self.receiver.end_aborted()  # what is asked about the queues is answered as of now
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
                self.group.send(report_placement(message.call_id))
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

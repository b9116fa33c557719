"""Owns one rank process of the layout lab: it joins its world once, and then takes one order after another.

Started by `world` with `python -m`; orders come on standard input, reports go to what was standard output. A
cell is the real path (publish, groups, worker, scheduler), measured from outside; the rank must not know what
the right answer is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from typing import Any

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.processes.model_files import published_model_config, published_tokenizer
from sglang.srt.processes.rank_config import read_frame, write_frame
from sglang.srt.runtime_context import SpawnRanks, get_forward, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_utils
from sglang.test.fakes.fake_channel import FakeChannel, answers
from sglang.test.lab import faults as lab_faults
from sglang.test.lab import messages as lab_messages
from sglang.test.lab.messages import (
    GROUPS,
    JOINED,
    START_TIMEOUT_S,
    CellOrder,
    RankAnswer,
    RankError,
    RankReport,
    RequestReport,
)

#: A cell has a few hundred steps; a scheduler that never becomes idle is stopped here.
MAX_STEPS = 2000


class ForwardRecorder:
    """Wraps a worker's forward and records what it computes, and the logits of each drawn token."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._forward = worker.model_runner.forward
        self.vocab_size = worker.vocab_size
        self.draws: dict[int, list[bytes]] = {}
        self.forwards: Counter[str] = Counter()
        self.paddings: Counter[str] = Counter()
        self.unfinished_prompts = 0
        self.head_calls = 0
        worker.model_runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        output = self._forward(batch)
        self.forwards[batch.forward_mode.value] += 1
        step = batch.dp_step
        if step is not None:
            self.paddings["max_len" if get_forward().dp_max_padding else "sum_len"] += 1
        self.head_calls += self._head_calls(batch)
        if batch.forward_mode is ForwardMode.EXTEND and None in batch.sampling_states:
            self.unfinished_prompts += 1
        for at, b in enumerate(output.drawing):
            self._record(batch.sampling_states[b], output.logits[at])
        return output

    @staticmethod
    def _head_calls(batch: ForwardBatch) -> int:
        """How often the head runs for so few rows.

        A head shared by all replicas runs once, the head of one replica once for the rows to draw from and
        once for the rows of prompts.
        """
        if batch.dp_step is not None and not get_parallel().enable_dp_lm_head:
            return int(sum(batch.dp_step.num_logit_rows) > 0)
        drawing = sum(row is not None for row in batch.sampling_states)
        return int(drawing > 0) + int(batch.num_logit_rows > drawing)

    def _record(self, sampling: SamplingState | None, logits: torch.Tensor) -> None:
        assert sampling is not None
        drawn = self.draws.setdefault(sampling.seed, [])
        if sampling.num_output != len(drawn):
            raise AssertionError(
                f"the request with seed {sampling.seed} draws token {sampling.num_output}, "
                f"and {len(drawn)} were drawn"
            )
        if tuple(logits.shape) != (self.vocab_size,) or logits.dtype != torch.float32:
            raise AssertionError(f"logits of {tuple(logits.shape)}, {logits.dtype}; {self.vocab_size} wanted")
        drawn.append(logits.numpy().tobytes())  # a copy: the sampler writes into its logits


def run_cell(order: CellOrder, planted: contextlib.ExitStack) -> RankReport:
    """Build the layout anew, load the model, run all phases, and count."""
    parallel_state.destroy_model_parallel()
    fault = lab_faults.find(order.fault)
    if fault is not None and fault.before_publish:
        planted.enter_context(fault.plant())
    _publish(order)
    parallel_state.initialize_model_parallel()
    if fault is not None and not fault.before_publish:
        planted.enter_context(fault.plant())
    model_config = published_model_config()
    channel = FakeChannel() if order.is_attn_tp_leader else None
    with spec_utils.draft_tp_context(owns_attention=order.draft):
        worker = TpModelWorker(model_config)
        scheduler = Scheduler(worker, tokenizer=published_tokenizer(model_config), channel=channel)
    recorder = ForwardRecorder(worker)
    groups = {name: getattr(get_parallel(), f"{name}_group") for name in GROUPS}
    before = {name: Counter(group.calls) for name, group in groups.items()}
    steps = 0
    for phase in order.phases:
        with spec_utils.draft_tp_context(owns_attention=order.draft):
            steps += _run_phase(scheduler, channel, phase)
    draws = {seed: b"".join(rows) for seed, rows in recorder.draws.items()}
    return RankReport(
        requests={} if channel is None else _reports(channel),
        draws=draws if order.is_attn_tp_leader else {},
        vocab_size=recorder.vocab_size,
        parameter_bytes=parameter_bytes(worker.model_runner.model),
        kv_bytes_per_token=kv_bytes_per_token(worker),
        calls={name: dict(group.calls - before[name]) for name, group in groups.items()},
        forwards=dict(recorder.forwards),
        paddings=dict(recorder.paddings),
        unfinished_prompts=recorder.unfinished_prompts,
        head_calls=recorder.head_calls,
        steps=steps,
    )


def _publish(order: CellOrder) -> None:
    ranks = SpawnRanks(world_rank=order.world_rank, dp_rank=order.dp_rank) if order.with_bundle else None
    publish(ServerArgs(**order.fields), role="scheduler", ranks=ranks)
    if ranks is None:
        # No group and no width answers these two; everything else is read from the groups from now on.
        get_parallel().override_permanently(dp_rank=order.dp_rank, gpu_id=None)


def _run_phase(
    scheduler: Scheduler, channel: FakeChannel | None, inbox: list[TokenizedGenerateReqInput]
) -> int:
    if channel is not None:
        channel.inbox.extend(inbox)
    for step in range(1, MAX_STEPS):
        going_on = scheduler.step()
        scheduler.invariants.check_sum()
        scheduler.invariants.check_slots()
        if not going_on:
            if channel is not None and channel.inbox:
                raise AssertionError("the scheduler is idle while messages lie in its inbox")
            return step
    raise AssertionError(f"a phase is not over after {MAX_STEPS} steps")


def _reports(channel: FakeChannel) -> dict[str, RequestReport]:
    return {
        rid: RequestReport(
            ids=answer.ids,
            finish_reason=answer.finish_reason,
            cached_tokens=answer.cached_tokens,
            num_retractions=answer.num_retractions,
            output_logprobs=answer.output_logprobs,
            input_logprobs=answer.input_logprobs,
        )
        for rid, answer in answers(channel).items()
    }


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that this rank holds, each unpacked from the form in which it is stored.

    What a layer keeps besides (a second form of the same numbers, rotary tables) is not counted, and a head
    that shares the table of the embedding counts nothing.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() == 0:  # it was packed, and lies in `stored` now
            packed: Any = module
            total += packed.stored.unpack().nbytes
    return total


def kv_bytes_per_token(worker: TpModelWorker) -> int:
    """Bytes of the pool by its number of slots, the reserved page included."""
    pool = worker.pools.kv
    slots = pool.size + pool.page_size
    layers = map(pool.layer, range(pool.spec.num_layers))
    return sum(layer.nbytes for layer in layers if isinstance(layer, torch.Tensor)) // slots


def serve(world_rank: int, world_size: int, meeting: str, timeout_s: float) -> None:
    """Take orders until the pipe ends; what the product prints goes to the log, not to the reports.

    `timeout_s` limits the collectives of the cells, but not the start of the ranks.
    """
    reports = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(
        world_size=world_size,
        rank=world_rank,
        local_rank=world_rank,
        store=torch.distributed.FileStore(meeting, world_size),
        timeout_s=START_TIMEOUT_S,
    )
    get_parallel().world_group.timeout_s = timeout_s  # groups inherit the limit of their world
    write_frame(reports, JOINED)
    planted, name = contextlib.ExitStack(), None
    while (frame := read_frame(0)) is not None:
        order = lab_messages.decode_order(frame)
        if order.fault != name:
            planted.close()
        # A fault that stays is not planted again: what it has kept since the last cell is its point.
        name, order.fault = order.fault, None if order.fault == name else order.fault
        try:
            answer = RankAnswer(report=run_cell(order, planted))
        except Exception as error:  # noqa: BLE001 - every failure of a cell is a result of the lab
            answer = RankAnswer(
                error=RankError(
                    kind=type(error).__name__, message=str(error), traceback=traceback.format_exc()
                )
            )
        write_frame(reports, lab_messages.encode(answer))
    planted.close()
    parallel_state.destroy_distributed_environment()
    os._exit(0)  # an ordered end of torch takes longer than a cell


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))

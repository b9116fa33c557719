"""Owns one rank process of the layout lab: it joins its world once, and then takes one order after another.

Started by `world`; orders come on standard input, reports go to what was standard output. A
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
from typing import NoReturn

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.processes.model_files import published_model_config, published_tokenizer
from sglang.srt.processes.rank_config import read_frame, write_frame
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.algorithms.served import DRAFTERS
from sglang.srt.speculative.algorithms.standalone import StandaloneDrafter
from sglang.srt.speculative.spec_registry import make_worker
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.fakes.fake_channel import FakeChannel, answers
from sglang.test.lab import draft_faults, faults
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
from sglang.test.lab.recorders import DrawRecorder, ForwardRecorder, counted_scopes

#: A cell has a few hundred steps; a scheduler that never becomes idle is stopped here.
MAX_STEPS = 2000

_FAULTS = {**faults.FAULTS, **draft_faults.FAULTS}


def run_cell(order: CellOrder, planted: contextlib.ExitStack) -> RankReport:
    """Build the layout anew, load the model, run all phases, and count."""
    parallel_state.destroy_model_parallel()
    fault = None if order.fault is None else _FAULTS[order.fault]
    if fault is not None and fault.before_publish:
        planted.enter_context(fault.plant())
    _publish(order)
    parallel_state.initialize_model_parallel()
    if fault is not None and not fault.before_publish:
        planted.enter_context(fault.plant())
    model_config = published_model_config()
    channel = FakeChannel() if order.is_attn_tp_leader else None
    with spec_utils.draft_tp_context(owns_attention=order.in_draft_scope):
        worker = make_worker(model_config, DRAFTERS)
        scheduler = Scheduler(worker, tokenizer=published_tokenizer(model_config), channel=channel)
    recorders = _Recorders(worker, order)
    groups = {name: getattr(get_parallel(), f"{name}_group") for name in GROUPS}
    before = {name: Counter(group.calls) for name, group in groups.items()}
    entries: Counter[str] = Counter()
    steps = 0
    with counted_scopes(entries):
        for phase in order.phases:
            with spec_utils.draft_tp_context(owns_attention=order.in_draft_scope):
                steps += _run_phase(scheduler, channel, phase)
    return recorders.report(
        requests={} if channel is None else _reports(channel),
        calls={name: dict(group.calls - before[name]) for name, group in groups.items()},
        steps=steps,
        scope_entries=dict(entries),
    )


class _Recorders:
    """What watches the worker of a rank: its target, the draft model if there is one, and the draws."""

    def __init__(self, worker: TpModelWorker | SpecWorker, order: CellOrder) -> None:
        target = worker.target if isinstance(worker, SpecWorker) else worker
        self._target = ForwardRecorder(target.model_runner, target.pools.kv, spans_replicas=True)
        self._draws = DrawRecorder(target.model_runner, worker.vocab_size, is_leader=order.is_attn_tp_leader)
        self._draft: ForwardRecorder | None = None
        if isinstance(worker, SpecWorker):
            self._draws.watch_rounds(worker)
            drafter = worker.drafter
            if isinstance(drafter, EagleDrafter | StandaloneDrafter):
                (pool,) = target.pools.drafts
                owns = drafter.owns_attention
                self._draft = ForwardRecorder(drafter._draft.runner, pool, spans_replicas=not owns)

    def report(
        self,
        *,
        requests: dict[str, RequestReport],
        calls: dict[str, dict[str, int]],
        steps: int,
        scope_entries: dict[str, int],
    ) -> RankReport:
        """Everything that was measured since the start."""
        draws = self._draws
        return RankReport(
            requests=requests,
            draws=draws.draws(),
            vocab_size=draws.vocab_size,
            target=self._target.report(),
            draft=None if self._draft is None else self._draft.report(),
            calls=calls,
            unfinished_prompts=draws.unfinished_prompts,
            steps=steps,
            rounds=draws.rounds,
            scope_entries=scope_entries,
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
            num_rounds=0 if answer.spec is None else answer.spec.num_rounds,
        )
        for rid, answer in answers(channel).items()
    }


def serve(world_rank: int, world_size: int, meeting: str, timeout_s: float) -> NoReturn:
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


def main() -> NoReturn:
    """Serve as the rank that the one argument describes."""
    serve(**json.loads(sys.argv[1]))

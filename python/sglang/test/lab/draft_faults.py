"""Owns the mistakes around drafts that the layout lab can plant into product code, by name.

Planted by `rank` as those in `faults` are. Three of them do no harm where they are planted, and a test says
so: what they take away says what is so anyway, or what they spoil is used by nobody. Must not change the lab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler_components.dp_attn import DpAttnSync
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.drafts.registry import DraftModel
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import spec_worker
from sglang.srt.speculative.algorithms import eagle, served
from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.draft_runner import best_children
from sglang.srt.speculative.spec_registry import DraftSetup
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.speculative.verify import RoundOutcome
from sglang.test.lab.faults import Fault, replaced

#: A draft is made in two phases, each inside its scope: model, and attention back end.
_CONSTRUCTION = 2
#: How far the second best logit of a rank is lifted above the best: what other rounding could do.
_NUDGE = 1e-6

Scope = AbstractContextManager[None]


@contextmanager
def _scopes(keeps: Callable[[int], bool]) -> Iterator[None]:
    """Of the scopes that an EAGLE draft enters only some are there, by how many were entered before."""
    right = draft_tp_context
    entered = 0

    def wrong(owns_attention: bool) -> Scope:
        nonlocal entered
        entered += 1
        return right(owns_attention=owns_attention) if keeps(entered - 1) else nullcontext()

    with replaced((eagle, "draft_tp_context"), by=wrong):
        yield


@contextmanager
def _target_in_the_scope() -> Iterator[None]:
    """The scope of the draft is open while the target runs."""
    right = ModelRunner.forward

    def wrong(runner: ModelRunner[DraftModel], batch: ForwardBatch) -> LogitsProcessorOutput:
        if runner.placement.attn_dp_size == 1:  # the draft, in its scope
            return right(runner, batch)
        with draft_tp_context(owns_attention=True):
            return right(runner, batch)

    with replaced((ModelRunner, "forward"), by=wrong):
        yield


@contextmanager
def _no_pipeline_scope() -> Iterator[None]:
    """Without pipeline parallelism the scope says what is so anyway."""
    with replaced((eagle, "draft_pp_context"), by=nullcontext):
        yield


@contextmanager
def _nobody_owns() -> Iterator[None]:
    """A draft that works in one group follows the layout of its target."""

    def follows(setup: DraftSetup) -> EagleDrafter:
        return served._eagle(setup, kind="eagle3", owns_attention=False)

    with mock.patch.dict(served.DRAFTERS, {"EAGLE3": follows}):
        yield


@contextmanager
def _other_rounding() -> Iterator[None]:
    """Ranks other than the leader compute another best token in every row that the target verifies."""
    right = ModelRunner.forward

    def wrong(runner: ModelRunner[DraftModel], batch: ForwardBatch) -> LogitsProcessorOutput:
        output = right(runner, batch)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and not get_parallel().is_attn_tp_leader:
            best = output.logits.topk(2, dim=-1)
            output.logits.scatter_(1, best.indices[:, 1:], best.values[:, :1] + _NUDGE)
        return output

    with replaced((ModelRunner, "forward"), by=wrong):
        yield


@contextmanager
def _each_accepts() -> Iterator[None]:
    """Every rank accepts by its own logits; nobody hears the leader."""

    def wrong(batch: ForwardBatch, compute: Callable[[], RoundOutcome], kind: type) -> RoundOutcome:
        return compute()

    with replaced((spec_worker, "share"), by=wrong):
        yield


@contextmanager
def _other_proposals() -> Iterator[None]:
    """Ranks other than the leader draft the second best token of every row."""
    right = best_children

    def wrong(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not get_parallel().is_attn_tp_leader:
            logits = logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)
        return right(logits, topk)

    with replaced((eagle, "best_children"), by=wrong):
        yield


@contextmanager
def _each_proposes() -> Iterator[None]:
    """Every rank verifies its own proposals."""
    with replaced((spec_worker, "share_tree"), by=lambda tree: tree):
        yield


@contextmanager
def _idle_replicas_wait() -> Iterator[None]:
    """A replica without requests leaves out its part of the draft's levels."""
    with replaced((EagleDrafter, "idle_propose"), by=lambda drafter, step, num_nodes: None):
        yield


@contextmanager
def _requests_for_tokens() -> Iterator[None]:
    """A replica takes the request counts of the others for their token counts."""
    right = DpStep.of_phase

    def wrong(step: DpStep, *, rows: int, logit_rows: int) -> DpStep:
        phase, mine = right(step, rows=rows, logit_rows=logit_rows), get_parallel().attn_dp_rank
        counts: Sequence[int] = step.num_requests
        return replace(
            phase,
            num_tokens=[n if r == mine else counts[r] for r, n in enumerate(phase.num_tokens)],
        )

    with replaced((DpStep, "of_phase"), by=wrong):
        yield


@contextmanager
def _own_slots() -> Iterator[None]:
    """A replica verifies as many nodes as it has room for, whatever room the others have."""
    with replaced((spec_worker, "_slots"), by=lambda batch, step: batch.slots_per_request):
        yield


@contextmanager
def _no_vote() -> Iterator[None]:
    """A replica decodes unless it has a prompt itself."""
    with replaced((DpAttnSync, "may_decode"), by=lambda sync, *, has_prompt, **rest: not has_prompt):
        yield


@contextmanager
def _both(*faults: Scope) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


FAULTS: dict[str, Fault] = {
    "the draft's phases outside its scope": Fault(lambda: _scopes(lambda before: before < _CONSTRUCTION)),
    "the draft built on the tensor group": Fault(lambda: _scopes(lambda before: before >= _CONSTRUCTION)),
    "the target in the draft's scope": Fault(_target_in_the_scope),
    "no pipeline scope": Fault(_no_pipeline_scope),
    "a draft of one group follows its target": Fault(_nobody_owns),
    "other rounding on one rank": Fault(_other_rounding),
    "each rank accepts, other rounding": Fault(lambda: _both(_other_rounding(), _each_accepts())),
    "other proposals on one rank": Fault(_other_proposals),
    "each rank proposes, other proposals": Fault(lambda: _both(_other_proposals(), _each_proposes())),
    "idle replicas do not propose": Fault(_idle_replicas_wait),
    "request counts for token counts": Fault(_requests_for_tokens),
    "replicas verify by their own room": Fault(_own_slots),
    "no vote before a step": Fault(_no_vote),
}

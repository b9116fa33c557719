"""Owns the mistakes that the layout lab can plant into product code, inside a rank process, by name.

Planted by `rank` around a cell, as those of drafts are (`draft_faults`); a test asserts that each is noticed.
A fault replaces a name of the product for the length of a block, and must not change the lab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.distributed import communication_op, parallel_state
from sglang.srt.distributed.group_coordinator import GroupCoordinator
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers import communicator, linear, vocab_parallel_embedding
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel, publication, widths
from sglang.srt.speculative import spec_utils

#: A cell has hundreds of sums; this one is skipped.
_SKIPPED_CALL = 5


@dataclass(frozen=True)
class Fault:
    """How to plant it, and whether before publishing; else it is planted before the model is built."""

    plant: Callable[[], AbstractContextManager[None]]
    before_publish: bool = False


@contextmanager
def replaced(*places: tuple[Any, str], by: Any) -> Iterator[None]:
    """One object in place of the same name in several modules, for a block."""
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, by))
        yield


@contextmanager
def _getter_off_by_one(getter: str) -> Iterator[None]:
    """A live getter is one too high, modulo the width; it is only read where ranks are not stamped."""
    right = getattr(parallel_state, getter)

    def wrong() -> int:
        return (right() + 1) % get_parallel().tp_size

    with replaced((parallel_state, getter), by=wrong):
        yield


@contextmanager
def _layers_get_the_rank_below() -> Iterator[None]:
    """Layers are given a rank that is one too low, so that no rank holds the last share."""
    right = linear.axis_place

    def wrong(axis: linear.Axis) -> tuple[int, int]:
        rank, width = right(axis)
        return max(rank - 1, 0), width

    with replaced((linear, "axis_place"), (vocab_parallel_embedding, "axis_place"), by=wrong):
        yield


@contextmanager
def _stamp_off_by_one() -> Iterator[None]:
    """The derived attention rank that is stamped is one too high."""
    right = widths.derive_attention_ranks

    def wrong(**seat: int) -> widths.AttentionRanks:
        ranks = right(**seat)
        place = (ranks.attn_tp_rank + 1) % seat["attn_tp_size"]
        return widths.AttentionRanks(ranks.attn_dp_rank, ranks.attn_cp_rank, place, ranks.dcp_rank)

    with replaced((publication, "derive_attention_ranks"), by=wrong):
        yield


@contextmanager
def _attention_cut_by_tp_size() -> Iterator[None]:
    """Attention layers take rank and width of the tensor group."""
    right = linear.axis_place
    with replaced((linear, "axis_place"), by=lambda axis: right("tp")):
        yield


@contextmanager
def _attention_summed_over_tp() -> Iterator[None]:
    """The output projection reduces over the tensor group."""
    wrong = communication_op.tensor_model_parallel_all_reduce
    with replaced((linear, "attention_tensor_parallel_all_reduce"), by=wrong):
        yield


@contextmanager
def _everything_here() -> Iterator[None]:
    """Each rank loads the whole model and sums with none: right answers, but nothing is shared out."""
    sums = replaced(
        (linear, "attention_tensor_parallel_all_reduce"),
        (vocab_parallel_embedding, "attention_tensor_parallel_all_reduce"),
        (communicator, "tensor_model_parallel_all_reduce"),
        by=lambda tensor: tensor,
    )
    places = replaced(
        (linear, "axis_place"), (vocab_parallel_embedding, "axis_place"), by=lambda axis: (0, 1)
    )
    with sums, places:
        yield


@contextmanager
def _one_sum_skipped(everywhere: bool) -> Iterator[None]:
    """The fifth sum over the tensor group is left out, by all ranks or by its last one."""
    right = GroupCoordinator.all_reduce
    seen = 0

    def wrong(group: GroupCoordinator, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        nonlocal seen
        if group.group_name == "tp":
            seen += 1
            if seen == _SKIPPED_CALL and (everywhere or group.rank_in_group == group.world_size - 1):
                return tensor
        return right(group, tensor, op)

    with replaced((GroupCoordinator, "all_reduce"), by=wrong):
        yield


@contextmanager
def _destroyed_group_kept() -> Iterator[None]:
    """Attention layers keep the group that they first summed over."""
    kept: list[GroupCoordinator] = []

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(get_parallel().attn_tp_group)
        return kept[0].all_reduce(tensor)

    with replaced((linear, "attention_tensor_parallel_all_reduce"), by=wrong):
        yield


@contextmanager
def _living_group_kept() -> Iterator[None]:
    """The same with communicators that outlive the layout and calls counted where they belong.

    Only the answers can show it.
    """
    parallel = get_parallel()
    width = parallel.attn_tp_size
    blocks = [list(range(first, first + width)) for first in range(0, parallel.launch_world_size, width)]
    kept = GroupCoordinator(blocks, parallel.launch_world_rank, "gloo", group_name="kept")

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        get_parallel().attn_tp_group.calls["all_reduce"] += 1
        return kept.all_reduce(tensor)

    with replaced((linear, "attention_tensor_parallel_all_reduce"), by=wrong):
        yield


@contextmanager
def _guard(on: bool) -> Iterator[None]:
    """Runners compare their placement, or do not; without it the answers show what the guard is for."""
    with replaced((ParallelState, "check_in_force"), by=lambda placement: None) if not on else nullcontext():
        yield


@contextmanager
def _target_in_the_draft_scope(guarded: bool) -> Iterator[None]:
    """The scope of the draft is left open while the target runs."""
    right = ModelRunner.forward

    def wrong(runner: ModelRunner, batch: ForwardBatch) -> LogitsProcessorOutput:
        with spec_utils.draft_tp_context(owns_attention=True):
            return right(runner, batch)

    with _guard(guarded), replaced((ModelRunner, "forward"), by=wrong):
        yield


@contextmanager
def _draft_outside_its_scope(guarded: bool) -> Iterator[None]:
    """The draft is built in its scope, but runs outside it."""
    right = spec_utils.draft_tp_context
    entered = False

    def wrong(owns_attention: bool) -> AbstractContextManager[None]:
        nonlocal entered
        scope = nullcontext() if entered else right(owns_attention=owns_attention)
        entered = True
        return scope

    with _guard(guarded), replaced((spec_utils, "draft_tp_context"), by=wrong):
        yield


FAULTS: dict[str, Fault] = {
    "live tp rank off by one": Fault(lambda: _getter_off_by_one("get_tensor_model_parallel_rank")),
    "live attention rank off by one": Fault(
        lambda: _getter_off_by_one("get_attn_tensor_model_parallel_rank")
    ),
    "layers get the rank below": Fault(_layers_get_the_rank_below),
    "stamped attention rank off by one": Fault(_stamp_off_by_one, before_publish=True),
    "attention cut by tp_size": Fault(_attention_cut_by_tp_size),
    "attention summed over the tensor group": Fault(_attention_summed_over_tp),
    "everything on every rank": Fault(_everything_here),
    "one sum skipped by all": Fault(lambda: _one_sum_skipped(everywhere=True)),
    "one sum skipped by one rank": Fault(lambda: _one_sum_skipped(everywhere=False)),
    "target in the draft scope": Fault(lambda: _target_in_the_draft_scope(guarded=True)),
    "target in the draft scope, unguarded": Fault(lambda: _target_in_the_draft_scope(guarded=False)),
    "draft outside its scope": Fault(lambda: _draft_outside_its_scope(guarded=True)),
    "draft outside its scope, unguarded": Fault(lambda: _draft_outside_its_scope(guarded=False)),
    "a stale copy of a destroyed group": Fault(_destroyed_group_kept),
    "a stale copy of a group that still works": Fault(_living_group_kept),
}

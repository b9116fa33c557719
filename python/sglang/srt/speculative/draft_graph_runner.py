"""Owns the recorded work of a draft: all its steps of a round, or its pass over the accepted tokens.

Held by a draft worker, which brings the unit of work: the same function that it runs eagerly. Made and
captured inside the draft's scopes. It must not know an algorithm: it stages named tensors and batches,
replays, and gives back named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs, Recipe
from sglang.srt.model_executor.runner.static_batch import (
    ForwardShape,
    GraphSizes,
    StaticBatch,
    step_of_graph,
)
from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs
from sglang.srt.model_executor.runner_utils.buffers import BufferSpec, StaticBuffers
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_tree import DraftShape
from sglang.srt.speculative.round_batch import Round

#: Runs forward number `step` of a unit. Eagerly this is the draft's model runner, whatever the step.
RunForward = Callable[[int, ForwardBatch], LogitsProcessorOutput]
#: (inputs, a batch for each forward, how to run one) -> outputs. The unit may replace the ids, hidden rows
#: and mask of a batch by what it computed; it takes numbers of rows from shapes and lengths from no list.
DraftUnit = Callable[[Mapping[str, torch.Tensor], Sequence[ForwardBatch], RunForward], Outputs]


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One round of `num_requests` requests: what the unit takes.

    `most_requests` are those of the largest attention replica; an idle one brings none of its own, and its
    batches are empty. `widths`: the rows of a request in each forward, in every replica.
    """

    num_requests: int
    most_requests: int
    widths: Sequence[int]
    inputs: Mapping[str, torch.Tensor]
    batches: Sequence[ForwardBatch]

    @classmethod
    def of(
        cls, round: Round, inputs: Mapping[str, torch.Tensor], batches: Sequence[ForwardBatch]
    ) -> DraftWork:
        """The work of a round of this replica."""
        step = round.dp_step
        most = (
            round.batch_size if step is None or get_parallel().attn_dp_size == 1 else max(step.num_requests)
        )
        widths = [batch.spec.width for batch in batches if batch.spec is not None]
        return cls(round.batch_size, most, widths, inputs, batches)


class DraftUnitRunner:
    """Runs one unit of a draft's work: as a graph where one is recorded, else operation by operation."""

    def __init__(self, unit: DraftUnit, run: RunForward) -> None:
        self.unit = unit
        self._run = run
        self.graph_runner: DraftGraphRunner | None = None

    def run(self, work: DraftWork) -> Outputs:
        """The outputs of the unit; of a replica without requests there are none."""
        if self.graph_runner is not None and self.graph_runner.can_run(work):
            return self.graph_runner.run(work)
        if work.num_requests == 0:
            for step, batch in enumerate(work.batches):
                self._run(step, batch)
            return {}
        return self.unit(work.inputs, work.batches, self._run)


class DraftGraphRunner(BaseRunner[DraftWork, dict[str, torch.Tensor]]):
    """Replays a unit of several forwards as one graph.

    `shapes` has one entry a forward, `inputs` says what the unit reads beside the batches. Every output of
    the unit has requests as its first dimension. `scope` is the draft's own, for recapture, which happens
    outside it.
    """

    graphs: CapturedGraphs

    def __init__(
        self,
        name: str,
        unit: DraftUnit,
        model: nn.Module,
        attn_backend: AttentionBackend,
        *,
        shapes: Sequence[ForwardShape],
        inputs: Sequence[BufferSpec],
        sizes: GraphSizes,
        make_backend: Callable[[], GraphBackend],
        device: torch.device,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model = model
        self.attn_backend = attn_backend
        self._unit = unit
        self.buffers = StaticBuffers(inputs, max(sizes.requests), device)
        self.forwards = [StaticBatch(attn_backend, shape, sizes, device) for shape in shapes]
        recipe = Recipe(
            name=name,
            prepare=self._stage_padding,
            forward=self._forward,
            model=model,
            make_backend=make_backend,
            scope=scope,
        )
        self.graphs = CapturedGraphs(recipe, sizes.requests, pads=sizes.pads)

    def can_run(self, work: DraftWork) -> bool:
        """Whether a graph has the forwards of this work, and is large enough: alike in every replica."""
        widths = [static.shape.width for static in self.forwards]
        return list(work.widths) == widths and self.graphs.size_for(work.most_requests) is not None

    def run(self, work: DraftWork) -> dict[str, torch.Tensor]:
        """Stage, replay, slice and copy: what a draft gives outlives the next replay."""
        size = self.graphs.size_for(work.most_requests)
        if size is None:
            raise RuntimeError(f"no graph is captured for {work.most_requests} requests; ask can_run first")
        if work.num_requests:
            self.buffers.write(work.inputs, work.num_requests, size)
        else:
            self.buffers.reset(size)
        for static, batch in zip(self.forwards, work.batches, strict=True):
            static.stage(batch, size)
        outputs = self.graphs.replay(size)
        return {name: output[: work.num_requests].clone() for name, output in outputs.items()}

    def _stage_padding(self, size: int) -> None:
        self.buffers.reset(size)
        for static in self.forwards:
            static.stage_padding(size)

    def _forward(self, size: int) -> Outputs:
        """What is recorded: the unit over static tensors."""

        def run(step: int, batch: ForwardBatch) -> LogitsProcessorOutput:
            plan = self.forwards[step].plan(size)
            if self.forwards[step].shape.mask_in_unit:
                assert batch.spec is not None and batch.spec.tail_mask is not None
                self.attn_backend.set_tail_mask(plan, batch.spec.tail_mask)
            batch.dp_step = step_of_graph(
                size, rows=batch.num_tokens // size, logit_rows=batch.num_logit_rows // size
            )
            output: LogitsProcessorOutput = self.model(ForwardContext(batch, self.attn_backend, plan))
            return output

        batches = [static.batch(size) for static in self.forwards]
        return self._unit(self.buffers.views(size), batches, run)


def verify_shape(shape: DraftShape) -> ForwardShape:
    """The target's forward in a whole round of such drafts: a tree is told by a mask over its nodes."""
    nodes = shape.num_nodes
    return ForwardShape(ForwardMode.TARGET_VERIFY, nodes, tail=0 if shape.topk == 1 else nodes)

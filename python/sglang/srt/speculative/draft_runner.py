"""Owns a draft model over the target's slots: its forwards, those over prompts, its part where it is idle.

Used by drafters with a model, always inside their scope. It must not know which tokens to feed or where a
draft's state is kept; what a round runs is in `draft_steps.py` and in the drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic

import torch
from torch import nn

from sglang.kernels import draft_trees
from sglang.kernels.sample_tokens import best_tokens
from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.layers.attention.base_attn_backend import KVPool
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import Model, ModelRunner
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs
from sglang.srt.model_executor.runner.static_batch import ForwardShape, GraphSizes
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.srt.model_executor.runner_utils.buffers import BufferSpec
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_graph_runner import DraftGraphRunner, DraftUnitRunner, DraftWork


class DraftRunner(Generic[Model]):
    """A draft's model over the target's slots."""

    def __init__(self, load: Callable[[torch.dtype, torch.device], Model]) -> None:
        self.runner = ModelRunner(load, kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype)

    @property
    def model(self) -> Model:
        return self.runner.model

    def init_attention_backend(self, kv: KVPool, req_to_token: torch.Tensor) -> None:
        self.runner.init_attention_backend(kv, req_to_token)

    def run(self, step: int, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Forward number `step` of a unit of work; its number counts only where units are recorded."""
        return self.runner.forward(batch)

    def prompts(
        self, batch: ForwardBatch, token_ids: torch.Tensor, hidden: torch.Tensor | None, *, scores: bool
    ) -> LogitsProcessorOutput:
        """The rows of the target's EXTEND batch with other tokens; the last row of each request is scored."""
        rows = last_rows(batch) if scores else batch.positions.new_empty(0)
        spec = SpecInput(0, hidden=hidden, logit_rows=rows)
        step = None if batch.dp_step is None else prompts_step(batch.dp_step, scores=scores)
        batch = replace(batch, input_ids=token_ids, spec=spec, dp_step=step, capture_hidden=False)
        return self.runner.forward(batch)

    def idle(self, step: DpStep) -> None:
        """This replica's part of a forward of the others."""
        self.runner.forward(ForwardBatch.idle(step, self.runner.device))

    def idle_work(self, step: DpStep, forwards: Sequence[tuple[int, int]]) -> DraftWork:
        """This replica's part of a unit of the others: rows of a request in each forward, all and scored."""
        phases = [step.of_phase(rows=rows, logit_rows=scored) for rows, scored in forwards]
        batches = [ForwardBatch.idle(phase, self.runner.device) for phase in phases]
        return DraftWork(0, max(step.num_requests), [rows for rows, _ in forwards], {}, batches)

    def record(
        self,
        unit: DraftUnitRunner,
        shapes: Sequence[ForwardShape],
        inputs: Sequence[BufferSpec],
        *,
        sizes: GraphSizes,
        make_backend: Callable[[], GraphBackend],
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """From now on `unit` is replayed where its work fits; `scope` is the draft's own, for recapture."""
        model: object = self.model
        assert isinstance(model, nn.Module)  # its weights must stay where the graph has read them
        unit.graph_runner = DraftGraphRunner(
            f"draft graphs of {len(shapes)} forwards",
            unit.unit,
            model,
            self.runner.attn_backend,
            shapes=shapes,
            inputs=inputs,
            sizes=sizes,
            make_backend=make_backend,
            device=self.runner.device,
            scope=scope,
        )
        unit.graph_runner.graphs.capture()


def recorded_graphs(units: Iterable[DraftUnitRunner]) -> list[CapturedGraphs]:
    """What has to be recorded anew when weights move; empty where no unit is recorded."""
    return [unit.graph_runner.graphs for unit in units if unit.graph_runner is not None]


def last_rows(batch: ForwardBatch) -> torch.Tensor:
    """The last row of each request of an EXTEND batch."""
    return torch.tensor(batch.extend_lens, device=batch.input_ids.device).cumsum(0) - 1


def shifted_ids(batch: ForwardBatch, next_ids: torch.Tensor) -> torch.Tensor:
    """The token after each row of an EXTEND batch, [num_tokens]; `next_ids` [batch] follow the last rows."""
    token_ids = batch.input_ids.roll(-1)
    token_ids[last_rows(batch)] = next_ids
    return token_ids


def prompts_step(step: DpStep, *, scores: bool) -> DpStep:
    """The step of a draft's forward over prompts: the tokens of the target's, and a row each to score."""
    rows = step.num_requests if scores else [0] * len(step.num_requests)
    return replace(step, num_logit_rows=rows)


def best_children(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `topk` most likely ids of each row [rows, topk], and their probabilities; a chain needs none."""
    if topk == 1:
        return best_tokens(logits)[0][:, None], None
    return draft_trees.best_children(logits, topk)


def check_topk(topk: int, vocab_size: int) -> None:
    """`ValueError` where a draft has fewer tokens than a node may have branches."""
    if topk > vocab_size:
        raise ValueError(
            f"--speculative-eagle-topk {topk} is more than the {vocab_size} tokens that the draft may "
            "propose; lower it"
        )

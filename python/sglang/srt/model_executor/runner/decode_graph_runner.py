"""Owns the recorded forwards of a target: decode steps, or verify rounds of one width.

Held by the model runner beside its eager runner. It stages a batch, replays the graph of the next larger size
and gives the rows of real requests. It must not sample, nor read a length off the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs, Recipe
from sglang.srt.model_executor.runner.static_batch import (
    ForwardShape,
    GraphSizes,
    StaticBatch,
    requests_of_largest_replica,
    step_of_graph,
)
from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs
from sglang.srt.models.common.decoder import DecoderForCausalLM


class DecodeGraphRunner(BaseRunner[ForwardBatch, LogitsProcessorOutput]):
    """Serves batches of one shape: DECODE with one row a request, or TARGET_VERIFY with `shape.width`.

    Rounds bring trees where `shape.tail` is the width, else chains. `captures_hidden`: the graphs give hidden
    rows too, for batches that want them. Made in the scope in which it is captured; until
    `graphs.capture()` it serves nothing.
    """

    graphs: CapturedGraphs

    def __init__(
        self,
        model: DecoderForCausalLM,
        attn_backend: AttentionBackend,
        shape: ForwardShape,
        sizes: GraphSizes,
        *,
        make_backend: Callable[[], GraphBackend],
        device: torch.device,
        captures_hidden: bool = False,
    ) -> None:
        self.model = model
        self.attn_backend = attn_backend
        self.shape = shape
        self.captures_hidden = captures_hidden
        self.static = StaticBatch(attn_backend, shape, sizes, device)
        recipe = Recipe(
            name=f"{shape.mode.value} graphs of width {shape.width}",
            prepare=self.static.stage_padding,
            forward=self._forward,
            model=model,
            make_backend=make_backend,
        )
        self.graphs = CapturedGraphs(recipe, sizes.requests, pads=sizes.pads)

    def can_run(self, work: ForwardBatch) -> bool:
        """Whether there is a graph for this batch; with attention replicas, for the largest of them."""
        if work.forward_mode is ForwardMode.IDLE:
            fits = work.dp_step is not None
        else:
            fits = work.forward_mode is self.shape.mode and self._takes(work.spec)
            fits = fits and (self.captures_hidden or not work.capture_hidden)
        return fits and self._size(work) is not None

    def run(self, work: ForwardBatch) -> LogitsProcessorOutput:
        """Stage, replay, slice. The logits hold until the next replay; hidden rows are the caller's own."""
        size = self._size(work)
        if size is None:
            raise RuntimeError(f"no graph is captured for this batch of {work.batch_size}; ask can_run first")
        self.static.stage(work, size)
        return self._output(work, self.graphs.replay(size))

    def _takes(self, spec: SpecInput | None) -> bool:
        """A decode step has nothing beside its tokens; a round has the width of the graphs."""
        if spec is None or self.shape.mode is ForwardMode.DECODE:
            return spec is None and self.shape.mode is ForwardMode.DECODE
        mask = spec.tail_mask
        return spec.width == self.shape.width and (mask is None or mask.shape[2] == self.shape.tail)

    def _size(self, batch: ForwardBatch) -> int | None:
        requests = requests_of_largest_replica(batch, self.shape.width)
        return None if requests is None else self.graphs.size_for(requests)

    def _forward(self, size: int) -> Outputs:
        """What is recorded: the model over static buffers, all rows scored."""
        batch = self.static.batch(size)
        batch.capture_hidden = self.captures_hidden
        batch.dp_step = step_of_graph(size, rows=self.shape.width, logit_rows=self.shape.width)
        output = self.model(ForwardContext(batch, self.attn_backend, self.static.plan(size)))
        outputs = {"logits": output.logits}
        if output.hidden is not None:
            outputs["hidden"] = output.hidden
        return outputs

    def _output(self, batch: ForwardBatch, outputs: Outputs) -> LogitsProcessorOutput:
        """The rows of real requests, as the eager forward gives them."""
        count, rows = batch.batch_size, batch.num_tokens
        logits = outputs["logits"]
        logits = logits if len(logits) == rows else logits[:rows]
        if batch.spec is not None and batch.spec.logit_rows is not None:
            logits = logits.index_select(0, batch.spec.logit_rows)
        return LogitsProcessorOutput(
            logits,
            drawing=list(range(count)) if batch.spec is None else [],
            input_logprobs=None if batch.logprob_requests is None else [None] * count,
            failures=[None] * count,
            hidden=outputs["hidden"][:rows].clone() if batch.capture_hidden else None,
        )

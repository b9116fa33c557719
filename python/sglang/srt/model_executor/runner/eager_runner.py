"""Owns a forward that runs operation by operation.

Held by the model runner, for every batch that no recorded graph serves. It must not choose: it takes all.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.dp_attention import prepare_dp_forward
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.runtime_context import get_parallel


class RunnableModel(Protocol):
    """What a runner needs of a model: one forward, and what it caches of each token."""

    def __call__(self, ctx: ForwardContext) -> LogitsProcessorOutput: ...

    def kv_shape(self) -> tuple[int, int, int]: ...


class EagerRunner(BaseRunner[ForwardBatch, LogitsProcessorOutput]):
    """Plan once, run all layers, give the logits that are needed."""

    def __init__(self, model: RunnableModel, attn_backend: AttentionBackend) -> None:
        self.model = model
        self.attn_backend = attn_backend

    def can_run(self, work: ForwardBatch) -> bool:
        return True

    def run(self, work: ForwardBatch) -> LogitsProcessorOutput:
        if get_parallel().attn_dp_size > 1:
            prepare_dp_forward(work)
        plan = None
        if work.forward_mode is not ForwardMode.IDLE:
            plan = self.attn_backend.init_forward_metadata(work)
        return self.model(ForwardContext(work, self.attn_backend, plan))

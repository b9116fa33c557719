"""Owns one rank's model and its attention back end, and runs a forward over them.

Built by the tensor-parallel worker, and once more for a draft model. It composes its parts, makes no pool and
does not sample. Whether a forward runs eagerly or replays a graph is chosen here, in one place. It keeps no
tensor-parallel group (layers ask the context in the scope that runs) and runs in no other placement than its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.attention.attention_registry import published_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVPool, KVSpec
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner_components.load_model import published_dtype
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner, RunnableModel
from sglang.srt.platforms.device import model_device
from sglang.srt.runtime_context import assert_role, get_device

Model = TypeVar("Model", bound=RunnableModel)


class ModelRunner(Generic[Model]):
    """A loaded model; `forward` takes a batch and gives logits once `init_attention_backend` has run.

    `load(dtype, device)` makes the model, in the scope that is open here: that is where it lives.
    """

    def __init__(
        self, load: Callable[[torch.dtype, torch.device], Model], *, kv_cache_dtype: str | None = None
    ) -> None:
        """kv_cache_dtype: int8, or any other name for the type of computation (resolution compares them)."""
        assert_role("scheduler")
        self.device = model_device(get_device().device)
        self.dtype = published_dtype()
        #: Where this model lives: it is built in the scope that is open here, and runs in no other.
        self.placement = ParallelState.from_context()
        self.backend_class = published_attention_backend()
        self.model = load(self.dtype, self.device)
        self.kv_spec = KVSpec(*self.model.kv_shape(), torch.int8 if kv_cache_dtype == "int8" else self.dtype)
        self._eager_runner: EagerRunner | None = None
        #: Whether the last forward replayed a graph.
        self.replayed = False
        #: Asked in this order.
        self.graph_runners: list[BaseRunner[ForwardBatch, LogitsProcessorOutput]] = []

    def init_attention_backend(self, kv: KVPool, req_to_token: torch.Tensor) -> None:
        """Attend over this pool and this table of slots [request rows, positions] from now on."""
        self._eager_runner = EagerRunner(self.model, self.backend_class(kv, req_to_token))

    @property
    def eager_runner(self) -> EagerRunner:
        """`RuntimeError` before there is a pool to attend over."""
        if self._eager_runner is None:
            raise RuntimeError("this runner has no attention back end yet: make the pools first")
        return self._eager_runner

    @property
    def attn_backend(self) -> AttentionBackend:
        return self.eager_runner.attn_backend

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run all layers over the batch, give the logits that are needed.

        With attention data parallelism every rank of the tensor group must call it, those without requests
        with `ForwardBatch.idle(step, device)`. `RuntimeError` in another placement than the one in which the
        runner was built.
        """
        self.placement.check_in_force()
        runner = self.runner_for(batch)
        self.replayed = runner is not self._eager_runner
        return runner.run(batch)

    def runner_for(self, batch: ForwardBatch) -> BaseRunner[ForwardBatch, LogitsProcessorOutput]:
        """The one place that chooses between recorded graphs and the eager forward."""
        for runner in self.graph_runners:
            if runner.can_run(batch):
                return runner
        return self.eager_runner

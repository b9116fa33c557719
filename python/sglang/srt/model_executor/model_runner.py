"""Owns one rank's model and its attention back end, and runs a forward over them.

Built by the tensor-parallel worker, and once more for a draft model. It composes its parts, makes no pool and
does not sample. It keeps no tensor-parallel group (layers ask the context in the scope that runs) and runs in
no other placement than its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.attention.attention_registry import published_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVPool, KVSpec
from sglang.srt.layers.dp_attention import prepare_dp_forward
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner_components.load_model import published_dtype
from sglang.srt.platforms.device import model_device
from sglang.srt.runtime_context import assert_role, get_device, get_parallel


class RunnableModel(Protocol):
    """What a runner needs of a model: one forward, and what it caches of each token."""

    def __call__(self, ctx: ForwardContext) -> LogitsProcessorOutput: ...

    def kv_shape(self) -> tuple[int, int, int]: ...


Model = TypeVar("Model", bound=RunnableModel)


class ModelRunner(Generic[Model]):
    """A loaded model; `forward` takes a batch and gives logits once `init_attention_backend` has run.

    `load(dtype, device)` makes the model, in the scope that is open here: that is where it lives.
    """

    def __init__(self, load: Callable[[torch.dtype, torch.device], Model]) -> None:
        assert_role("scheduler")
        self.device = model_device(get_device().device)
        self.dtype = published_dtype()
        #: Where this model lives: it is built in the scope that is open here, and runs in no other.
        self.placement = ParallelState.from_context()
        self.backend_class = published_attention_backend()
        self.model = load(self.dtype, self.device)
        self.kv_spec = KVSpec(*self.model.kv_shape(), self.dtype)
        self._attn_backend: AttentionBackend | None = None

    def init_attention_backend(self, kv: KVPool, req_to_token: torch.Tensor) -> None:
        """Attend over this pool and this table of slots [request rows, positions] from now on."""
        self._attn_backend = self.backend_class(kv, req_to_token)

    @property
    def attn_backend(self) -> AttentionBackend:
        """`RuntimeError` before there is a pool to attend over."""
        if self._attn_backend is None:
            raise RuntimeError("this runner has no attention back end yet: make the pools first")
        return self._attn_backend

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Plan once, run all layers, give the logits that are needed.

        With attention data parallelism every rank of the tensor group must call it, those without requests
        with `ForwardBatch.idle(step, device)`. `RuntimeError` in another placement than the one in which the
        runner was built.
        """
        self.placement.check_in_force()
        if get_parallel().attn_dp_size > 1:
            prepare_dp_forward(batch)
        plan = None
        if batch.forward_mode is not ForwardMode.IDLE:
            plan = self.attn_backend.init_forward_metadata(batch)
        return self.model(ForwardContext(batch, self.attn_backend, plan))

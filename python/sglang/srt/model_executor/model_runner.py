"""Owns one rank's model, cache and attention back end, and runs a forward over them.

Built by the tensor-parallel worker. It composes its parts and does not sample. It keeps no tensor-parallel
group (layers ask the context in the scope that runs) and runs in no other placement than its own.
"""

from __future__ import annotations

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.attention.attention_registry import published_attention_backend
from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.layers.dp_attention import initialize_dp_attention, prepare_dp_forward
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import make_kv_pools
from sglang.srt.model_executor.model_runner_components.load_model import build_model, published_dtype
from sglang.srt.platforms import available_memory_bytes
from sglang.srt.platforms.device import model_device
from sglang.srt.runtime_context import assert_role, get_device, get_parallel


class ModelRunner:
    """A loaded model with its pools; `forward` takes a batch and gives logits."""

    def __init__(self, model_config: ModelConfig, *, num_ids: int | None = None) -> None:
        assert_role("scheduler")
        self.model_config = model_config
        self.device = model_device(get_device().device)
        self.dtype = published_dtype()
        if get_parallel().attn_dp_size > 1:
            initialize_dp_attention(
                hidden_size=model_config.hidden_size, dtype=self.dtype, device=self.device
            )
        #: Where this model lives: it is built in the scope that is open here, and runs in no other.
        self.placement = ParallelState.from_context()
        backend = published_attention_backend()
        before = available_memory_bytes()
        self.model = build_model(model_config, dtype=self.dtype, device=self.device)
        if num_ids is not None:
            self.model.limit_vocabulary(num_ids)
        self.pools = make_kv_pools(
            KVSpec(*self.model.kv_shape(), self.dtype),
            backend.kv_layout,
            context_len=model_config.context_len,
            device=self.device,
            available_before=before,
            available_now=available_memory_bytes(),
        )
        self.attn_backend = backend(self.pools.kv, self.pools.req_to_token.req_to_token)

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
        if batch.forward_mode is not ForwardMode.IDLE:
            self.attn_backend.init_forward_metadata(batch)
        output: LogitsProcessorOutput = self.model(ForwardContext(batch, self.attn_backend))
        return output

"""Owns what the scheduler sees of a rank: sizes, pools, and one call that turns a batch into tokens.

Built by the rank process after publishing; read by the scheduler. It must not schedule and holds no state of
requests: what a forward needs arrives with its batch. Only the leader of an attention-TP group draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.allocator import SlotAllocator
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.graph_setup import (
    add_decode_graphs,
    most_recorded_requests,
    published_graph_backend,
)
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import make_kv_pools
from sglang.srt.model_executor.model_runner_components.load_model import build_model, published_dtype
from sglang.srt.model_executor.result_broadcast import share_result
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.platforms import available_memory_bytes
from sglang.srt.platforms.device import model_device
from sglang.srt.runtime_context import assert_role, get_device, get_model, get_parallel


class TpModelWorker:
    """One rank's model behind the scheduler's interface.

    `num_ids` is how many ids the tokenizer knows; None without a tokenizer, where every row of the head is a
    token. Whoever brings a draft loads it first and calls `make_pools` then: one budget holds both.
    """

    slots_per_step = 1
    num_recent_ids = 0
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: SlotAllocator

    def __init__(
        self, model_config: ModelConfig, *, num_ids: int | None = None, has_draft: bool = False
    ) -> None:
        assert_role("scheduler")
        self.model_config = model_config
        self._available_before = available_memory_bytes()
        if get_parallel().attn_dp_size > 1:
            initialize_dp_attention(
                hidden_size=model_config.hidden_size,
                dtype=published_dtype(),
                device=model_device(get_device().device),
            )

        def load(dtype: torch.dtype, device: torch.device) -> DecoderForCausalLM:
            model = build_model(model_config, dtype=dtype, device=device)
            if num_ids is not None:
                model.limit_vocabulary(num_ids)
            return model

        self.model_runner = ModelRunner(load, kv_cache_dtype=get_model().kv_cache_dtype)
        self.sampler = Sampler()
        self.vocab_size: int = self.model_runner.model.lm_head.vocab_size
        self.context_len = model_config.context_len
        if not has_draft:
            self.make_pools()
            self.record(ForwardShape(ForwardMode.DECODE, 1))

    def make_pools(self, *, drafts: Sequence[KVSpec] = (), slots_per_step: int = 1) -> None:
        """Make the pools of the target and of its drafts, and the target's attention back end.

        A decode step writes at most `slots_per_step` slots of a request.
        """
        runner = self.model_runner
        pools = make_kv_pools(
            runner.kv_spec,
            runner.backend_class.kv_layout,
            drafts=drafts,
            context_len=self.context_len,
            slots_per_step=slots_per_step,
            device=runner.device,
            available_before=self._available_before,
            available_now=available_memory_bytes(),
        )
        runner.init_attention_backend(pools.kv, pools.req_to_token.req_to_token)
        self.pools = pools
        self.page_size = pools.kv.page_size
        self.max_total_num_tokens = pools.kv.size
        self.req_to_token_pool = pools.req_to_token
        self.token_to_kv_pool_allocator = pools.allocator

    def record(self, shape: ForwardShape, *, captures_hidden: bool = False) -> None:
        """Record the steps or rounds of this shape, where graphs are published; others run eagerly."""
        make_backend = published_graph_backend()
        if make_backend is not None:
            add_decode_graphs(
                self.model_runner,
                self.req_to_token_pool,
                shape,
                make_backend,
                max_requests=most_recorded_requests(self.req_to_token_pool),
                free_bytes=available_memory_bytes(),
                captures_hidden=captures_hidden,
            )

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ForwardBatch) -> GenerationBatchResult:
        """Run the model over the batch and draw a token for every request whose prompt is complete.

        The tokens are in the result once it is read. An idle batch of a data-parallel step runs for the sake
        of the collectives in it and gives nothing.
        """
        if batch.batch_size == 0:
            if batch.dp_step is not None:
                self.model_runner.forward(batch)
            return GenerationBatchResult([], [])
        result = self.share_drawn(batch, self.model_runner.forward(batch))
        result.replayed = self.model_runner.replayed
        return result

    def share_drawn(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> GenerationBatchResult:
        """What is drawn from the logits of a forward, the same on every rank of the attention-TP group."""
        return share_result(batch, lambda: self._sample(batch, output))

    def _sample(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> GenerationBatchResult:
        requests = batch.logprob_requests
        result = GenerationBatchResult(
            next_token_ids=[[] for _ in range(batch.batch_size)],
            failures=output.failures,
            output_logprobs=None if requests is None else [[] for _ in range(batch.batch_size)],
            input_logprobs=output.input_logprobs,
        )
        if output.drawing:
            result.drawing = output.drawing
            result.drawn = self.sampler(
                output.logits,
                [state for state in batch.sampling_states if state is not None],
                None if requests is None else [requests[b] for b in output.drawing],
            )
        return result

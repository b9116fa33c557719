"""Owns what the scheduler sees of a rank: sizes, pools, and one call that turns a batch into tokens.

Built by the rank process after publishing; read by the scheduler. It must not schedule and holds no state of
requests: what a forward needs arrives with its batch. Only the leader of an attention-TP group draws.
"""

from __future__ import annotations

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.result_broadcast import share_result


class TpModelWorker:
    """One rank's model behind the scheduler's interface.

    `num_ids` is how many ids the tokenizer knows; None without a tokenizer, where every row of the head is a
    token.
    """

    def __init__(self, model_config: ModelConfig, *, num_ids: int | None = None) -> None:
        self.model_config = model_config
        self.model_runner = ModelRunner(model_config, num_ids=num_ids)
        self.sampler = Sampler()
        pools = self.model_runner.pools
        self.page_size = pools.kv.page_size
        self.max_total_num_tokens = pools.kv.size
        self.vocab_size = self.model_runner.model.lm_head.vocab_size
        self.context_len = model_config.context_len
        self.req_to_token_pool = pools.req_to_token
        self.token_to_kv_pool_allocator = pools.allocator

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
        output = self.model_runner.forward(batch)
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

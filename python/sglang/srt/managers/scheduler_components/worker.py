"""Owns what the scheduler needs of whoever runs the model, as a type.

Satisfied by `TpModelWorker` and by the fake worker of the tests. It must not ask for more than the
scheduler's parts read.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator import SlotAllocator
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool


class Worker(Protocol):
    """Sizes, pools, and one call that turns a batch into tokens.

    `slots_per_step` says how many slots from its position on a request must have in a decode step: 1 without
    a draft. `num_recent_ids` is how many of a request's last tokens a decode step brings along, 0 for none.
    """

    model_config: ModelConfig
    page_size: int
    vocab_size: int
    context_len: int
    slots_per_step: int
    num_recent_ids: int
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: SlotAllocator

    def forward_batch_generation(self, batch: ForwardBatch) -> GenerationBatchResult: ...

"""Owns a loaded worker that a test drives without a scheduler: sequences, slots, and forwards of any shape.

Read by model and worker tests, which decide themselves how prompts are cut and batched. It must not share
code with the scheduler, so that a mistake there cannot hide one in the worker.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.algorithms.served import DRAFTERS
from sglang.srt.speculative.spec_registry import make_worker
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.test_utils import published_topology


@dataclass
class DrivenSequence:
    """One sequence: its tokens so far, how many of them are in the cache, its row of the request table."""

    ids: list[int]
    sampling: SamplingState
    req_pool_idx: int
    cached: int = 0
    slots: list[int] = field(default_factory=list)


class WorkerDriver:
    """Makes forward batches for a worker."""

    def __init__(self, worker: TpModelWorker | SpecWorker) -> None:
        self.worker = worker
        self.target = worker.target if isinstance(worker, SpecWorker) else worker

    def add(
        self, ids: Sequence[int], *, seed: int = 0, end_ids: Sequence[int] = (), **params: Any
    ) -> DrivenSequence:
        """A new sequence; greedy unless `temperature` is given."""
        req_pool_idx = self.worker.req_to_token_pool.alloc()
        assert req_pool_idx is not None
        sampling = SamplingState(SamplingParams(**{"temperature": 0.0, **params}), seed, end_ids)
        return DrivenSequence(list(ids), sampling, req_pool_idx)

    def batch(
        self,
        parts: Sequence[tuple[DrivenSequence, int]],
        *,
        asks: list[LogprobRequest | None] | None = None,
        decode: bool = False,
    ) -> ForwardBatch:
        """The next `count` tokens of each sequence; a token is drawn where its last token is among them."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for seq, count in parts:
            self._take_slots(seq, seq.cached + count)
            ids += seq.ids[seq.cached : seq.cached + count]
            positions += range(seq.cached, seq.cached + count)
            slots += seq.slots[seq.cached : seq.cached + count]
            seq.cached += count
        lens = [seq.cached for seq, _ in parts]
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(slots),
            req_pool_indices=torch.tensor([seq.req_pool_idx for seq, _ in parts]),
            seq_lens=torch.tensor(lens),
            seq_lens_list=lens,
            extend_lens=[count for _, count in parts],
            sampling_states=[seq.sampling if seq.cached == len(seq.ids) else None for seq, _ in parts],
            logprob_requests=asks,
        )

    def logits(self, parts: Sequence[tuple[DrivenSequence, int]], *, decode: bool = False) -> torch.Tensor:
        """Logits [drawing sequences, vocab] of one forward."""
        return self.target.model_runner.forward(self.batch(parts, decode=decode)).logits

    def step(
        self,
        parts: Sequence[tuple[DrivenSequence, int]],
        *,
        asks: list[LogprobRequest | None] | None = None,
        decode: bool = False,
    ) -> GenerationBatchResult:
        """One forward with sampling; drawn tokens are appended to their sequences."""
        result = self.worker.forward_batch_generation(self.batch(parts, asks=asks, decode=decode))
        result.read()
        for (seq, _), tokens in zip(parts, result.next_token_ids, strict=True):
            for token in tokens:
                seq.ids.append(token)
                seq.sampling.append(token)
        return result

    def generate(self, seqs: Sequence[DrivenSequence], count: int) -> list[list[int]]:
        """Prefill all together, then decode together: `count` new tokens each."""
        starts = [len(seq.ids) for seq in seqs]
        self.step([(seq, len(seq.ids) - seq.cached) for seq in seqs])
        for _ in range(count - 1):
            self.step([(seq, 1) for seq in seqs], decode=True)
        return [seq.ids[start:] for seq, start in zip(seqs, starts, strict=True)]

    def round(
        self, seqs: Sequence[DrivenSequence], *, is_narrow: bool = False, dp_step: DpStep | None = None
    ) -> GenerationBatchResult:
        """One round of a worker with a draft; what each sequence got is appended.

        With `is_narrow` they have one slot each, as when the pool is full. `dp_step` is what replicas agreed
        on, its slots included.
        """
        slots = 1 if is_narrow else self.worker.slots_per_step
        for seq in seqs:
            self._take_slots(seq, seq.cached + slots)
        batch = self.batch([(seq, 1) for seq in seqs], decode=True)
        batch.slots_per_request, batch.dp_step = slots, dp_step
        if self.worker.num_recent_ids:
            batch.recent_ids = [seq.ids[-self.worker.num_recent_ids :] for seq in seqs]
        result = self.worker.forward_batch_generation(batch)
        for seq, tokens in zip(seqs, result.next_token_ids, strict=True):
            seq.ids += tokens
            for token in tokens:
                seq.sampling.append(token)
            seq.cached = len(seq.ids) - 1
        return result

    def speculate(self, seqs: Sequence[DrivenSequence], count: int) -> tuple[list[list[int]], int]:
        """Prefill all together, then run rounds together until each has `count` new tokens.

        The tokens, cut to `count`, and how many rounds it took.
        """
        starts = [len(seq.ids) for seq in seqs]
        self.step([(seq, len(seq.ids) - seq.cached) for seq in seqs])
        rounds = 0
        while any(len(seq.ids) - start < count for seq, start in zip(seqs, starts, strict=True)):
            self.round(seqs)
            rounds += 1
        return [seq.ids[start : start + count] for seq, start in zip(seqs, starts, strict=True)], rounds

    def drop(self, seq: DrivenSequence) -> None:
        """Give the sequence's slots and row back."""
        self.worker.token_to_kv_pool_allocator.free(np.array(seq.slots, dtype=np.int64))
        self.worker.req_to_token_pool.free(seq.req_pool_idx)

    def _take_slots(self, seq: DrivenSequence, end: int) -> None:
        start = len(seq.slots)
        if end <= start:
            return
        last = seq.slots[-1] if seq.slots else -1
        fresh = self.worker.token_to_kv_pool_allocator.alloc_extend(start, end, last)
        assert fresh is not None, "the pool of this test is too small"
        self.worker.req_to_token_pool.write(seq.req_pool_idx, start, fresh)
        seq.slots += fresh.tolist()


@contextlib.contextmanager
def driven_worker(
    model: str | pathlib.Path,
    *,
    rank: int = 0,
    config: ModelConfig | None = None,
    num_ids: int | None = None,
    **server_args_fields: Any,
) -> Iterator[WorkerDriver]:
    """A worker on one published rank for the length of a block; float32 and 2048 slots by default.

    `num_ids` is what the tokenizer knows, where it is less than the head has. A layout of several ranks needs
    a process that is already in a world of that size (`run_ranks`); its groups exist for the length of the
    block.
    """
    fields = {
        "model_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch_native",
        "page_size": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 64,
        **server_args_fields,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(published_topology(ranks={"world_rank": rank, "dp_rank": None}, **fields))
        if get_parallel().tp_size > 1:
            parallel_state.initialize_model_parallel()
            stack.callback(parallel_state.destroy_model_parallel)
        elif fields.get("speculative_algorithm") is not None:
            # The scopes of a draft need the groups of a world of one.
            parallel_state.init_distributed_environment()
            stack.callback(parallel_state.destroy_distributed_environment)
            parallel_state.initialize_model_parallel()
            stack.callback(parallel_state.destroy_model_parallel)
        load_format = fields.get("load_format", "auto")
        yield WorkerDriver(
            make_worker(
                config or ModelConfig.from_path(str(model), load_format=load_format),
                DRAFTERS,
                num_ids=num_ids,
            )
        )

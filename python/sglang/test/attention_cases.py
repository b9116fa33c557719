"""Owns random attention problems: a cache, a table of slots, batches of every kind, and the answer by hand.

Read by tests of attention back ends and graph runners. The answer is computed key by key in float64, so that
it shares nothing with a back end. Every slot that no request of the batch owns is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import DraftTree, SpecInput
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVSpec, Plan
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool
from sglang.test.spoiled_slots import spoil

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shape of a random problem."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 1
    num_requests: int = 6  # rows of the table
    context: int = 40
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: the type of computation


class AttentionCases:
    """One back end of one layer over a pool whose every slot that a batch may not read is NaN."""

    def __init__(
        self, sizes: Sizes, *, seed: int = 0, backend: type[AttentionBackend] = TorchNativeBackend
    ) -> None:
        self.sizes = sizes
        self.draw = torch.Generator().manual_seed(seed)
        pages = -(-sizes.context // sizes.page_size)
        spec = KVSpec(1, sizes.kv_heads, sizes.dim, sizes.cache_dtype or sizes.dtype)
        self.pool = PagedKVPool(pages * sizes.num_requests, sizes.page_size, backend.kv_layout, spec)
        order = torch.randperm(pages * sizes.num_requests, generator=self.draw) + 1
        slots = order[:, None] * sizes.page_size + torch.arange(sizes.page_size)
        self.table = slots.view(sizes.num_requests, -1)[:, : sizes.context].contiguous()
        self.backend = backend(self.pool, self.table)
        self.layer = RadixAttention(sizes.heads, sizes.dim, sizes.dim**-0.5, sizes.kv_heads, 0)

    def number(self, low: int, high: int) -> int:
        """A random number from `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.draw))

    def random_tree(self, batch: int, num_nodes: int) -> DraftTree:
        """Trees whose every node has a random parent before it."""
        parents = [[-1, *(self.number(0, i - 1) for i in range(1, num_nodes))] for _ in range(batch)]
        return DraftTree(torch.zeros(batch, num_nodes, dtype=torch.int64), torch.tensor(parents))

    def batch(
        self,
        lengths: Sequence[int],
        *,
        width: int = 1,
        mode: ForwardMode = ForwardMode.DECODE,
        tail_mask: torch.Tensor | None = None,
        spec: bool = True,
    ) -> ForwardBatch:
        """A batch of requests in random rows of the table, with `width` new rows each.

        What the requests had before is filled with random numbers, all other slots but page 0 with NaN.
        """
        requests = torch.randperm(self.sizes.num_requests, generator=self.draw)[: len(lengths)]
        page_size = self.sizes.page_size
        spoil(self.pool, 0, torch.arange(page_size, self.pool.size + page_size))
        for request, length in zip(requests, lengths, strict=True):
            own = self.table[request, : length - width]
            self.pool.write(0, own, self._normal(2 * self.sizes.kv_heads, len(own), self.sizes.dim))
        positions = torch.tensor([range(length - width, length) for length in lengths])
        return ForwardBatch(
            forward_mode=mode,
            input_ids=torch.zeros(len(lengths) * width, dtype=torch.int64),
            positions=positions.view(-1),
            out_cache_loc=self.table[requests[:, None], positions].view(-1),
            req_pool_indices=requests,
            seq_lens=torch.tensor(list(lengths)),
            seq_lens_list=list(lengths),
            extend_lens=[width] * len(lengths),
            sampling_states=[None] * len(lengths),
            spec=SpecInput(width, tail_mask=tail_mask) if spec else None,
        )

    def rows(self, batch: ForwardBatch) -> Rows:
        """Random queries, keys and values for the rows of the batch."""
        sizes, count = self.sizes, batch.num_tokens
        return (
            self._normal(count, sizes.heads, sizes.dim),
            self._normal(count, sizes.kv_heads, sizes.dim),
            self._normal(count, sizes.kv_heads, sizes.dim),
        )

    def run(self, batch: ForwardBatch, rows: Rows) -> torch.Tensor:
        """The eager answer, [rows, heads * dim]."""
        return self.run_planned(self.backend.init_forward_metadata(batch), rows)

    def run_planned(self, plan: Plan, rows: Rows) -> torch.Tensor:
        """The answer over a plan that is filled."""
        return self.backend.forward(*rows, self.layer, plan)

    def by_hand(self, batch: ForwardBatch, rows: Rows) -> torch.Tensor:
        """The answer in float64, one row after another, from the keys that the cache holds now."""
        sizes, width = self.sizes, batch.num_tokens // batch.batch_size
        tail_mask = batch.spec.tail_mask if batch.spec is not None else None
        answers = []
        for b, length in enumerate(batch.seq_lens_list):
            slots = self.table[batch.req_pool_indices[b], :length]
            keys, values = self.pool.read(0, slots).double().chunk(2)
            for r in range(width):
                seen = list(range(length - width + r + 1))
                if tail_mask is not None:
                    named = tail_mask[b, r].tolist()
                    before = length - len(named)
                    seen = [*range(before), *(before + j for j, sees in enumerate(named) if sees)]
                for head in range(sizes.heads):
                    group = head // (sizes.heads // sizes.kv_heads)
                    scores = keys[group, seen] @ rows[0][b * width + r, head].double() * self.layer.scaling
                    answers.append(scores.softmax(0) @ values[group, seen])
        return torch.stack(answers).view(batch.num_tokens, -1)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.draw).to(self.sizes.dtype)

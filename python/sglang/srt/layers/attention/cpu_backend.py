"""Owns attention by the compiled kernel: one call a layer, whatever rows the requests of a batch have.

Chosen as `cpu`. What a row gives depends on its own keys alone, to the last bit: not on its neighbours, nor
on how a text was cut into chunks, steps and rounds. It must not read a slot that the request does not own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.kernels.compiled_for import COMPILED_DTYPES
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVPool, Plan, PlanShape
from sglang.srt.layers.attention.kv_block_layout import KVBlockLayout, attention_kernels
from sglang.srt.layers.attention.torch_native_plan import rows_per_request

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention


class CpuPlan(Plan):
    """Where the rows and the slots of each request lie; with a shape, in tensors that stay where they are."""

    __slots__ = ("first_rows", "lengths", "out_cache_loc", "shape", "table_rows", "tail_mask")

    out_cache_loc: torch.Tensor  # [num_tokens]: where the keys and values of the new tokens go
    table_rows: torch.Tensor  # [requests]: rows of the table of slots
    first_rows: torch.Tensor  # [requests + 1]
    lengths: torch.Tensor  # [requests]
    tail_mask: torch.Tensor | None  # [requests, width, tail] bool

    def __init__(self, shape: PlanShape | None, device: torch.device) -> None:
        self.shape = shape
        self.tail_mask = None
        if shape is None:
            return
        count, width = shape.num_requests, shape.width
        self.out_cache_loc = torch.zeros(count * width, dtype=torch.int64, device=device)
        self.table_rows = torch.zeros(count, dtype=torch.int64, device=device)
        self.first_rows = torch.arange(count + 1, device=device) * width
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)

    def fill(self, batch: ForwardBatch) -> None:
        _, tail_mask = rows_per_request(batch)
        if self.shape is None:
            self.out_cache_loc = batch.out_cache_loc
            self.table_rows, self.lengths = batch.req_pool_indices, batch.seq_lens
            self.first_rows = torch.tensor([0, *batch.extend_lens]).cumsum(0)
            self.tail_mask = None if tail_mask is None else tail_mask.contiguous()
            return
        count, width = self.shape.num_requests, self.shape.width
        if batch.extend_lens != [width] * count or max(batch.seq_lens_list) > self.shape.max_len:
            raise RuntimeError(
                f"a plan for {count} requests of {width} rows and at most {self.shape.max_len} keys cannot "
                f"hold a batch of {batch.extend_lens} rows and {batch.seq_lens_list} keys; pad it, or run it "
                "eagerly"
            )
        self.out_cache_loc.copy_(batch.out_cache_loc)
        self.table_rows.copy_(batch.req_pool_indices)
        self.lengths.copy_(batch.seq_lens)
        if tail_mask is not None:
            self.set_tail_mask(tail_mask)
        elif self.tail_mask is not None:  # a chain is the tree in which every node follows the one before it
            tail = self.tail_mask.shape[2]
            self.tail_mask.fill_(True).copy_(self.tail_mask.tril(tail - width))

    def set_tail_mask(self, tail_mask: torch.Tensor) -> None:
        if self.tail_mask is None:  # the first fill says how many keys a mask covers; it stays that many
            self.tail_mask = torch.empty(tail_mask.shape, dtype=torch.bool, device=tail_mask.device)
        self.tail_mask.copy_(tail_mask)

    def part(self, num_requests: int) -> CpuPlan:
        """The first requests, over the same memory."""
        assert self.shape is not None
        plan = CpuPlan(None, self.lengths.device)
        plan.shape = PlanShape(num_requests, self.shape.width, self.shape.max_len)
        plan.out_cache_loc = self.out_cache_loc[: num_requests * self.shape.width]
        plan.table_rows, plan.lengths = self.table_rows[:num_requests], self.lengths[:num_requests]
        plan.first_rows = self.first_rows[: num_requests + 1]
        return plan


class CpuBackend(AttentionBackend):
    """Store, then one kernel over the slots of each request."""

    kv_layout = KVBlockLayout()

    def __init__(self, pool: KVPool, req_to_token: torch.Tensor) -> None:
        kernels = attention_kernels()
        if pool.spec.dtype not in (*COMPILED_DTYPES, torch.int8):
            raise ValueError(
                "--attention-backend cpu serves caches of float32, bfloat16 and int8, and this one is of "
                f"{pool.spec.dtype}; use torch_native"
            )
        self.pool = pool
        self.req_to_token = req_to_token
        self._store, self._attend = kernels.store_kv, kernels.paged_attention

    def make_plan(self, shape: PlanShape | None = None) -> Plan:
        return CpuPlan(shape, self.req_to_token.device)

    def part_of_plan(self, plan: Plan, num_requests: int) -> Plan:
        assert isinstance(plan, CpuPlan)
        return plan.part(num_requests)

    def fill(self, plan: Plan, batch: ForwardBatch) -> None:
        assert isinstance(plan, CpuPlan)
        plan.fill(batch)

    def set_tail_mask(self, plan: Plan, tail_mask: torch.Tensor) -> None:
        assert isinstance(plan, CpuPlan)
        plan.set_tail_mask(tail_mask)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, plan: Plan
    ) -> torch.Tensor:
        assert isinstance(plan, CpuPlan)
        kv = self.pool.layer(layer.layer_id)
        assert isinstance(kv, torch.Tensor)  # as this back end's layout made it
        self._store(k, v, kv, plan.out_cache_loc)
        if q.stride(1) != layer.head_dim or q.stride(2) != 1:
            q = q.contiguous()
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        self._attend(
            q,
            kv,
            self.req_to_token,
            plan.table_rows,
            plan.first_rows,
            plan.lengths,
            plan.tail_mask,
            out,
            layer.scaling,
        )
        return out

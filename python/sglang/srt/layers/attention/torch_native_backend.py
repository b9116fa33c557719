"""Owns attention in plain torch operations over the paged cache: the reference, and fast on CPU.

Chosen as `torch_native`. Requests with one new token are gathered into padded batches, whatever the forward
mode, and so are those of a speculative round, which have equally many rows each; other requests run one by
one. It must not read a slot that the request does not own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVPool, Plan, PlanShape
from sglang.srt.layers.attention.head_major_layout import HeadMajorLayout
from sglang.srt.layers.attention.torch_native_plan import GraphPlan, ManyRows, PaddedRows, TorchPlan

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention

#: Key elements, counted once for each row that reads them, up to which one thread attends: starting a second
#: one takes longer than it saves.
_ONE_THREAD_KEYS = 1 << 18


class TorchNativeBackend(AttentionBackend):
    """Gather, multiply, softmax, multiply."""

    kv_layout = HeadMajorLayout()

    def __init__(self, pool: KVPool, req_to_token: torch.Tensor) -> None:
        self.pool = pool
        self.req_to_token = req_to_token

    def make_plan(self, shape: PlanShape | None = None) -> Plan:
        if shape is None:
            return TorchPlan()
        return GraphPlan.allocate(shape, self.req_to_token.device, self.pool.spec.dtype)

    def part_of_plan(self, plan: Plan, num_requests: int) -> Plan:
        assert isinstance(plan, GraphPlan)
        return plan.part(num_requests)

    def fill(self, plan: Plan, batch: ForwardBatch) -> None:
        assert isinstance(plan, TorchPlan)
        plan.fill(batch, self.req_to_token, self.pool.spec.dtype)

    def set_tail_mask(self, plan: Plan, tail_mask: torch.Tensor) -> None:
        assert isinstance(plan, GraphPlan)
        plan.set_tail_mask(tail_mask)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, plan: Plan
    ) -> torch.Tensor:
        assert isinstance(plan, TorchPlan)
        kv = self.pool.layer(layer.layer_id)
        assert isinstance(kv, torch.Tensor)  # as this back end's layout made it
        if plan.padded and plan.padded[0].width > 1:
            # Masked keys and values enter the sums of a row, times zero: a node that is not finite would
            # spoil the nodes that do not see it. Its own row is not finite all the same.
            k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
        kv[: layer.num_kv_heads].index_copy_(1, plan.out_cache_loc, k.transpose(0, 1))
        kv[layer.num_kv_heads :].index_copy_(1, plan.out_cache_loc, v.transpose(0, 1))
        if len(plan.padded) == 1 and plan.padded[0].rows is None:
            return _run_padded(plan.padded[0], q, kv, layer)
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        for padded in plan.padded:
            assert padded.rows is not None
            out[padded.rows] = _run_padded(padded, q[padded.rows], kv, layer)
        for run in plan.many:
            part = slice(run.first, run.first + run.count)
            out[part] = _run_many(run, q[part], k[part], v[part], kv, layer)
        return out


def _run_padded(plan: PaddedRows, q: torch.Tensor, kv: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    """q [requests * width, heads, dim] -> [requests * width, heads * dim].

    The query heads of one kv head, in all rows of a request, are the rows of one product: no key is repeated.
    """
    heads, groups, dim = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim
    count, width, length = plan.count, plan.width, plan.length
    batches, rows = heads * count, width * groups
    if width == 1:
        queries = q.view(count, heads, groups * dim).transpose(0, 1)
    else:
        queries = q.view(count, width, heads, groups * dim).permute(2, 0, 1, 3)
    keys, values = kv.index_select(1, plan.slots).view(2, batches, length, dim)
    if q.dtype == torch.float32:
        out = _attend(queries.reshape(batches, rows, dim), keys, values, plan, layer.scaling)
    else:
        # 16-bit products of this size are slow one by one; the fused kernel sums in float32.
        shape = (heads, count, length, dim)
        mask = plan.mask
        if mask is not None:
            per_row = mask if width == 1 else mask.expand(count, width, groups, length)
            mask = per_row.reshape(1, count, -1, length)
        out = F.scaled_dot_product_attention(
            queries.reshape(heads, count, rows, dim),
            keys.view(shape),
            values.view(shape),
            attn_mask=mask,
            scale=layer.scaling,
        )
    if width == 1:
        return out.view(heads, count, groups * dim).transpose(0, 1).reshape(count, heads * groups * dim)
    out = out.view(heads, count, width, groups * dim).permute(1, 2, 0, 3)
    return out.reshape(count * width, heads * groups * dim)


def _run_many(
    run: ManyRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, layer: RadixAttention
) -> torch.Tensor:
    heads, groups, dim = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim
    if run.slots is None:
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
    else:
        keys, values = kv.index_select(1, run.slots).view(2, heads, -1, dim)
    queries = q.view(run.count, heads, groups, dim).permute(1, 2, 0, 3)  # [kv heads, groups, rows, dim]
    shape = (heads, groups, keys.shape[1], dim)
    out = F.scaled_dot_product_attention(
        queries,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=run.mask,
        is_causal=run.mask is None,
        scale=layer.scaling,
    )
    return out.permute(2, 0, 1, 3).reshape(run.count, heads * groups * dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PaddedRows, scaling: float
) -> torch.Tensor:
    """Attention of q [heads * requests, width * groups, dim] over k, v [heads * requests, length, dim].

    Small work stays on one thread.
    """
    small = k.device.type == "cpu" and k.numel() * plan.width <= _ONE_THREAD_KEYS
    threads = torch.get_num_threads() if small else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        if plan.mask is None:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(scaling)
        else:
            scores = q.new_empty(q.shape[0], q.shape[1], plan.length)
            scores.view(-1, plan.count, plan.width, q.shape[1] // plan.width, plan.length).copy_(plan.mask)
            scores.baddbmm_(q, k.transpose(1, 2), alpha=scaling)
        return torch.bmm(scores.softmax(dim=-1), v)
    finally:
        if threads > 1:
            torch.set_num_threads(threads)

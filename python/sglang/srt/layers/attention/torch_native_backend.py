"""Owns attention in plain torch operations over the paged cache: the reference, and fast on CPU.

Chosen as `torch_native`. Requests with one new token are gathered into padded batches, whatever the forward
mode; requests with more run one by one. It must not read a slot that the request does not own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVPool, KVSpec

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention

#: A padded batch holds requests of at least half its longest length, so at most half of the work is padding;
#: below this length another batch costs more than the padding.
_MIN_LENGTH_TO_SPLIT = 256
#: Key elements up to which one thread attends: starting a second one takes longer than it saves.
_ONE_THREAD_KEYS = 1 << 18


class HeadMajorLayout:
    """One tensor a layer, [2 * kv heads, slots, head_dim]: all key heads, then all value heads.

    One gather reads both, and what a head reads lies together. A page is a run of `page_size` slots.
    """

    def allocate(
        self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device
    ) -> list[torch.Tensor]:
        shape = (2 * spec.num_kv_heads, num_pages * page_size, spec.head_dim)
        layers = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers)]
        for storage in layers:
            # Padding reads slot 0 and multiplies it by a zero probability: it must be finite. The rest stays
            # untouched, so that a large pool takes memory only as it fills.
            storage[:, :page_size].zero_()
        return layers

    def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)  # as allocate made it
        layer.index_copy_(1, targets, layer.index_select(1, sources))


@dataclass(slots=True)
class _SingleRows:
    """Requests with one new token each, padded to the longest.

    `rows` are their rows in the batch (None: all rows in order), `slots` the flat table [requests * length],
    `mask` [kv heads * requests, 1, length] adds minus infinity to padding (None: nothing is padded).
    """

    count: int
    length: int
    rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class _ManyRows:
    """One request with several new tokens.

    They are the rows `first : first + count`; `slots` are all of the request's and `mask` [count, length] is
    causal. Both are None without a cached prefix: then the keys of the new tokens are all there are.
    """

    first: int
    count: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


class TorchNativeBackend(AttentionBackend):
    """Gather, multiply, softmax, multiply."""

    kv_layout = HeadMajorLayout()

    def __init__(self, pool: KVPool, req_to_token: torch.Tensor) -> None:
        self.pool = pool
        self.req_to_token = req_to_token
        self._singles: list[_SingleRows] = []
        self._many: list[_ManyRows] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Sort the requests into padded batches and runs."""
        self._singles, self._many = [], []
        singles: list[int] = []  # requests with one new token
        rows: list[int] = []  # and their rows
        first = 0
        for b, count in enumerate(batch.extend_lens):
            if count == 1:
                singles.append(b)
                rows.append(first)
            elif count > 1:
                self._many.append(self._plan_many(batch, b, first, count))
            first += count
        lengths = [batch.seq_lens_list[b] for b in singles]
        parts = _split_by_length(lengths)
        whole = len(parts) == 1 and not self._many
        for part in parts:
            self._singles.append(self._plan_singles(batch, singles, rows, part, whole=whole))

    def _plan_singles(
        self, batch: ForwardBatch, singles: list[int], rows: list[int], part: list[int], *, whole: bool
    ) -> _SingleRows:
        device = batch.seq_lens.device
        lengths = [batch.seq_lens_list[singles[i]] for i in part]
        length = max(lengths)
        table = batch.req_pool_indices
        if not whole:
            table = table[torch.tensor([singles[i] for i in part], device=device)]
        slots = self.req_to_token[:, :length].index_select(0, table)
        mask = None
        if min(lengths) < length:
            padding = torch.arange(length, device=device) >= torch.tensor(lengths, device=device)[:, None]
            slots = slots.masked_fill_(padding, 0)
            mask = torch.zeros(padding.shape, dtype=self.pool.spec.dtype, device=device)
            mask = mask.masked_fill_(padding, float("-inf"))[:, None].repeat(
                self.pool.spec.num_kv_heads, 1, 1
            )
        part_rows = None if whole else torch.tensor([rows[i] for i in part], device=device)
        return _SingleRows(len(part), length, part_rows, slots.reshape(-1), mask)

    def _plan_many(self, batch: ForwardBatch, b: int, first: int, count: int) -> _ManyRows:
        length = batch.seq_lens_list[b]
        if length == count:
            return _ManyRows(first, count, None, None)
        slots = self.req_to_token[batch.req_pool_indices[b], :length]
        mask = torch.ones(count, length, dtype=torch.bool, device=slots.device).tril_(length - count)
        return _ManyRows(first, count, slots, mask)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        kv = self.pool.layer(layer.layer_id)
        assert isinstance(kv, torch.Tensor)  # as this back end's layout made it
        kv[: layer.num_kv_heads].index_copy_(1, batch.out_cache_loc, k.transpose(0, 1))
        kv[layer.num_kv_heads :].index_copy_(1, batch.out_cache_loc, v.transpose(0, 1))
        if len(self._singles) == 1 and self._singles[0].rows is None:
            return self._run_singles(self._singles[0], q, kv, layer)
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        for plan in self._singles:
            assert plan.rows is not None
            out[plan.rows] = self._run_singles(plan, q[plan.rows], kv, layer)
        for run in self._many:
            part = slice(run.first, run.first + run.count)
            out[part] = self._run_many(run, q[part], k[part], v[part], kv, layer)
        return out

    def _run_singles(
        self, plan: _SingleRows, q: torch.Tensor, kv: torch.Tensor, layer: RadixAttention
    ) -> torch.Tensor:
        """The query heads of one kv head are the rows of one product, so no key is repeated."""
        heads, groups, dim = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim
        batches = heads * plan.count
        queries = q.view(plan.count, heads, groups, dim).transpose(0, 1)  # [kv heads, requests, groups, dim]
        k, v = kv.index_select(1, plan.slots).view(2, batches, plan.length, dim)
        if q.dtype == torch.float32:
            queries = queries.reshape(batches, groups, dim)
            out = _attend(queries, k, v, plan.mask, layer.scaling).view(heads, plan.count, groups, dim)
        else:
            # 16-bit products of this size are slow one by one; the fused kernel sums in float32.
            shape = (heads, plan.count, plan.length, dim)
            mask = None if plan.mask is None else plan.mask.view(heads, plan.count, 1, plan.length)
            out = F.scaled_dot_product_attention(
                queries, k.view(shape), v.view(shape), attn_mask=mask, scale=layer.scaling
            )
        return out.transpose(0, 1).reshape(plan.count, heads * groups * dim)

    def _run_many(
        self,
        run: _ManyRows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        layer: RadixAttention,
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """q [batches, rows, dim] over k, v [batches, length, dim]; small work stays on one thread."""
    threads = torch.get_num_threads() if q.device.type == "cpu" and k.numel() <= _ONE_THREAD_KEYS else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        if mask is None:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(scaling)
        else:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scaling)
        return torch.bmm(scores.softmax(dim=-1), v)
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def _split_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices into `lengths`, in parts that pad no member to more than twice its length (short ones aside).

    One part keeps the given order.
    """
    if not lengths:
        return []
    longest = max(lengths)
    if longest < _MIN_LENGTH_TO_SPLIT or min(lengths) * 2 >= longest:
        return [list(range(len(lengths)))]
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if parts:
            limit = lengths[parts[-1][0]]
            if limit < _MIN_LENGTH_TO_SPLIT or lengths[i] * 2 >= limit:
                parts[-1].append(i)
                continue
        parts.append([i])
    return parts

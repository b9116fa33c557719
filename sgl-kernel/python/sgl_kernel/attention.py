"""Owns attention over a paged cache: the call, what `torch.compile` needs to know, and the torch reference.

Read by the attention back ends and the tests.
"""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    first_rows: torch.Tensor,
    lengths: torch.Tensor,
    tail_mask: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of some rows of each request over its slots; what a row gives depends on its own keys alone.

    q: [rows, heads, dim], kv: [2 * kv heads, slots, dim] (all key heads, then all value heads), out: [rows,
    heads * dim], float32 or bfloat16. The rows of request b are `first_rows[b] : first_rows[b + 1]` of q, its
    keys the slots `table[table_rows[b], : lengths[b]]`. Row r of n sees the keys up to its own, which is
    `lengths[b] - n + r`; with tail_mask [requests, n, tail] it sees all keys but the last `tail`, and of
    these what the mask says. All indices are int64. A row that sees no key gives zeros.
    """
    torch.ops.sgl_kernel.paged_attention(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale)
    return out


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes k and v [rows, kv heads, dim] into the slots (int64 [rows]) of kv [2 * kv heads, slots, dim]."""
    torch.ops.sgl_kernel.store_kv(k, v, kv, slots)


def store_kv_reference(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """The same in torch."""
    kv.index_copy_(1, slots, torch.cat((k, v), dim=1).transpose(0, 1))


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    first_rows: torch.Tensor,
    lengths: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The same in float64, request by request."""
    groups = q.shape[1] // (kv.shape[0] // 2)
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2], dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        begin, end = first_rows[b : b + 2].tolist()
        slots, count = table[table_rows[b], :length], end - begin
        seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
        if tail_mask is not None:
            tail = tail_mask.shape[2]
            seen[:, : length - tail] = True
            seen[:, length - tail :] = tail_mask[b]
        keys, values = kv[:, slots].double().repeat_interleave(groups, dim=0).chunk(2)
        values = torch.where(seen.any(dim=0)[:, None], values, 0.0)  # what nobody sees may be anything
        scores = (q[begin:end].double().transpose(0, 1) @ keys.transpose(1, 2)) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        out[begin:end] = (weights @ values).transpose(0, 1)
    return out.flatten(1).to(q.dtype)


@torch.library.register_fake("sgl_kernel::paged_attention")
def _paged_attention_fake(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    first_rows: torch.Tensor,
    lengths: torch.Tensor,
    tail_mask: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::store_kv")
def _store_kv_fake(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Only writes into `kv`."""

"""Owns attention over a paged cache: the calls, how keys and values lie in it, and the torch references.

Read by the attention back ends and the tests. A cache of one layer is [2 * kv heads, blocks, 16 * padded
dim], all key heads before all value heads, a block being 16 slots and the padded dim a multiple of 16. Keys
are [padded dim / n, 16, n] within a block and values [16 / n, padded dim, n], where n is 1 at 32 bits and 2
below: one register then has a dimension of many keys, and no sum goes across it. In int8 the 16 float32
scales of its slots stand behind each block: each key and each value is rounded to -127 to 127 times a scale
of its own. Only this file and `KvBlock` of the compiled part know that; others use `kv_shape`, `read_kv`,
`write_kv`, `move_kv` and `store_kv`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Slots of a block. A request whose keys fill blocks in order is read without being put in order first.
KV_BLOCK_SLOTS = 16
#: Numbers of a row that are all smaller are stored in int8 as zeros.
_SMALLEST = 1e-30


def kv_shape(kv_heads: int, slots: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[int, int, int]:
    """The shape of the cache of one layer that has room for `slots` slots, in numbers of `dtype`."""
    scales = KV_BLOCK_SLOTS * 4 if dtype == torch.int8 else 0
    return 2 * kv_heads, -(-slots // KV_BLOCK_SLOTS), -(-dim // 16) * 16 * KV_BLOCK_SLOTS + scales


def kv_bytes_per_slot(kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes that the cache of one layer takes for a slot."""
    planes, _, numbers = kv_shape(kv_heads, KV_BLOCK_SLOTS, dim, dtype)
    return planes * numbers * dtype.itemsize // KV_BLOCK_SLOTS


def read_kv(kv: torch.Tensor, slots: torch.Tensor, dim: int) -> torch.Tensor:
    """Keys and values of some slots: [2 * kv heads, slots, dim], all key heads, then all value heads.

    Of a cache in int8 they are float32.
    """
    rows, scales = _read_rows(kv, slots)
    return rows[..., :dim] if scales is None else rows[..., :dim] * scales[..., None]


def write_kv(kv: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Sets some slots, each named once, to what `read_kv` would give: rows is [2 * kv heads, slots, dim].

    A cache in int8 rounds them; a row with a number that is not finite is read back as all NaN.
    """
    scales = None
    if kv.dtype == torch.int8:
        rows, scales = _rounded(rows.float())
    _write_rows(kv, slots, rows, scales)


def move_kv(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies slots `sources` [n] to slots `targets` [n], bit for bit; a slot may be in both."""
    torch.ops.sgl_kernel.move_kv(kv, sources, targets)


def move_kv_reference(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """The same in torch."""
    _write_rows(kv, targets, *_read_rows(kv, sources))


def _read_rows(kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers as stored [2 * kv heads, slots, padded dim], and the scales of int8 [2 * kv heads, slots]."""
    heads = kv.shape[0] // 2
    blocks, within = slots // KV_BLOCK_SLOTS, slots % KV_BLOCK_SLOTS
    keys, values, scales = _planes(kv)
    found_keys = keys[:, blocks, :, within].permute(1, 0, 2, 3).reshape(heads, len(slots), -1)
    together = keys.shape[-1]
    found_values = values[:, blocks, within // together, :, within % together].transpose(0, 1)
    rows = torch.cat((found_keys, found_values))
    return rows, None if scales is None else scales[:, blocks, within]


def _write_rows(
    kv: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, new_scales: torch.Tensor | None
) -> None:
    heads = kv.shape[0] // 2
    blocks, within = slots // KV_BLOCK_SLOTS, slots % KV_BLOCK_SLOTS
    keys, values, scales = _planes(kv)
    together = keys.shape[-1]
    rows = torch.nn.functional.pad(rows, (0, values.shape[-2] - rows.shape[-1]))
    new_keys = rows[:heads].unflatten(-1, (-1, together)).transpose(0, 1)
    keys[:, blocks, :, within] = new_keys
    values[:, blocks, within // together, :, within % together] = rows[heads:].transpose(0, 1)
    if scales is not None and new_scales is not None:
        scales[:, blocks, within] = new_scales


class _Planes(NamedTuple):
    """Views of a cache, n numbers together."""

    keys: torch.Tensor  # [heads, blocks, dim / n, 16, n]
    values: torch.Tensor  # [heads, blocks, 16 / n, dim, n]
    scales: torch.Tensor | None  # [2 * heads, blocks, 16] float32, of int8


def _planes(kv: torch.Tensor) -> _Planes:
    together, scales = (1 if kv.element_size() == 4 else 2), None
    if kv.dtype == torch.int8:
        numbers = kv.shape[2] - KV_BLOCK_SLOTS * 4
        kv, scales = kv[..., :numbers], kv[..., numbers:].view(torch.float32)
    padded = kv.shape[2] // KV_BLOCK_SLOTS
    keys, values = kv.chunk(2)
    return _Planes(
        keys.unflatten(2, (padded // together, KV_BLOCK_SLOTS, together)),
        values.unflatten(2, (KV_BLOCK_SLOTS // together, padded, together)),
        scales,
    )


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows as int8 and the scale of each, which is NaN where a number of it is not finite."""
    largest = rows.abs().amax(dim=-1)
    finite = rows.isfinite().all(dim=-1)
    counts = finite & (largest >= _SMALLEST)
    factor = torch.where(counts, torch.tensor(127.0) / largest, 0.0)  # not 127 / largest: that multiplies
    numbers = torch.where(counts[..., None], rows * factor[..., None], 0.0).round().to(torch.int8)
    return numbers, torch.where(finite, torch.where(counts, largest / 127, 0.0), float("nan"))


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

    q: [rows, heads, dim], kv: as `kv_shape` says, out: [rows, heads * dim], float32 or bfloat16; kv may be
    int8, and is then multiplied by queries and weights that are rounded to 16 bits. The rows of request b are
    `first_rows[b] : first_rows[b + 1]` of q, its keys the slots `table[table_rows[b], : lengths[b]]`. Row r
    of n sees the keys up to its own, which is `lengths[b] - n + r`; with tail_mask [requests, n, tail] it
    sees all keys but the last `tail`, and of these what the mask says. All indices are int64. A row that sees
    no key gives zeros.
    """
    torch.ops.sgl_kernel.paged_attention(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale)
    return out


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes k and v [rows, kv heads, dim] into the slots (int64 [rows]) of kv, as `kv_shape` says.

    Of 16 or 32 bits and of kv's dtype; or float32 or bfloat16 into int8, as `write_kv` rounds them.
    """
    torch.ops.sgl_kernel.store_kv(k, v, kv, slots)


def store_kv_reference(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """The same in torch."""
    write_kv(kv, slots, torch.cat((k, v), dim=1).transpose(0, 1))


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
        keys, values = read_kv(kv, slots, q.shape[2]).double().repeat_interleave(groups, dim=0).chunk(2)
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


@torch.library.register_fake("sgl_kernel::move_kv")
def _move_kv_fake(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Only writes into `kv`."""

"""Owns spoiling slots of a pool, whatever the layout of its back end: who reads them shows it.

Read by tests of attention, graphs and workers.
"""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool


def spoil(pool: PagedKVPool, layer_id: int, slots: torch.Tensor) -> None:
    """Put NaN into the keys and values in `slots` [n] of a layer."""
    shape = (2 * pool.spec.num_kv_heads, len(slots), pool.spec.head_dim)
    dtype = pool.spec.dtype if pool.spec.dtype.is_floating_point else torch.float32
    rows = torch.full(shape, float("nan"), dtype=dtype, device=pool.device)
    pool.write(layer_id, slots, rows)

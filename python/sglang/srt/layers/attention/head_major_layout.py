"""Owns the page layout of attention in torch: all heads of a layer in one tensor, keys before values.

Read by the back ends that use it. It must not know how they attend.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base_attn_backend import KVSpec


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

    def bytes_per_token(self, spec: KVSpec) -> int:
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def read(self, layer: object, slots: torch.Tensor, head_dim: int) -> torch.Tensor:
        assert isinstance(layer, torch.Tensor)  # as allocate made it
        return layer.index_select(1, slots)

    def write(self, layer: object, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)
        layer.index_copy_(1, slots, rows)

    def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)
        layer.index_copy_(1, targets, layer.index_select(1, sources))

"""Owns the page layout of the compiled kernel: blocks of 16 slots, in which keys lie as scores are summed.

Read by the `cpu` back end. How numbers lie within a block is the kernel's word (`sgl_kernel.attention`). It
must not know how pages are handed out; blocks and pages of another size may overlap.
"""

from __future__ import annotations

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.attention.base_attn_backend import KVSpec


class KVBlockLayout:
    """One tensor a layer, of the kernel's own shape."""

    def allocate(
        self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device
    ) -> list[torch.Tensor]:
        kernels = compiled_kernels()
        assert kernels is not None  # the back end that chose this layout has asked
        shape = kernels.attention.kv_shape(spec.num_kv_heads, num_pages * page_size, spec.head_dim)
        layers = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers)]
        for storage in layers:
            # A padding row may read what was never written there; the rest stays untouched, so that a large
            # pool takes memory only as it fills.
            storage[:, : -(-page_size // kernels.attention.KV_BLOCK_SLOTS)].zero_()
        return layers

    def read(self, layer: object, slots: torch.Tensor, head_dim: int) -> torch.Tensor:
        assert isinstance(layer, torch.Tensor)  # as allocate made it
        kernels = compiled_kernels()
        assert kernels is not None
        found: torch.Tensor = kernels.attention.read_kv(layer, slots, head_dim)
        return found

    def write(self, layer: object, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)
        kernels = compiled_kernels()
        assert kernels is not None
        kernels.attention.write_kv(layer, slots, rows)

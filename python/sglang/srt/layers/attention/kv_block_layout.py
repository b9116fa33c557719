"""Owns the page layout of the compiled kernel: blocks of 16 slots, in which keys lie as scores are summed.

Read by the `cpu` back end. How numbers lie within a block is the kernel's word (`sgl_kernel.attention`). It
must not know how pages are handed out; blocks and pages of another size may overlap.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.attention.base_attn_backend import KVSpec


def attention_kernels() -> ModuleType:
    """`sgl_kernel.attention`; `RuntimeError` with the cure where it is not used."""
    kernels = compiled_kernels()
    if kernels is None:
        raise RuntimeError(
            "--attention-backend cpu needs the compiled kernels, which are not installed or switched off; "
            "run `make kernels`, or use torch_native"
        )
    attention: ModuleType = kernels.attention
    return attention


class KVBlockLayout:
    """One tensor a layer, of the kernel's own shape."""

    def allocate(
        self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device
    ) -> list[torch.Tensor]:
        kernels = attention_kernels()
        shape = kernels.kv_shape(spec.num_kv_heads, num_pages * page_size, spec.head_dim, spec.dtype)
        layers = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers)]
        for storage in layers:
            # A padding row may read what was never written there; the rest stays untouched, so that a large
            # pool takes memory only as it fills.
            storage[:, : -(-page_size // kernels.KV_BLOCK_SLOTS)].zero_()
        return layers

    def bytes_per_token(self, spec: KVSpec) -> int:
        kernels = attention_kernels()
        per_layer: int = kernels.kv_bytes_per_slot(spec.num_kv_heads, spec.head_dim, spec.dtype)
        return spec.num_layers * per_layer

    def read(self, layer: object, slots: torch.Tensor, head_dim: int) -> torch.Tensor:
        assert isinstance(layer, torch.Tensor)  # as allocate made it
        found: torch.Tensor = attention_kernels().read_kv(layer, slots, head_dim)
        return found

    def write(self, layer: object, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)
        attention_kernels().write_kv(layer, slots, rows)

    def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
        assert isinstance(layer, torch.Tensor)
        attention_kernels().move_kv(layer, sources, targets)

"""Owns what an attention back end is: its two calls, the page layout it chooses, and the pool as it sees it.

Read by models (through `RadixAttention`), the KV pool and the model runner. It must not import `mem_cache`:
the pool arrives as a protocol. Nobody but the back end may assume how keys and values lie in a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one rank caches per token: its share of the heads, for all its layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVLayout(Protocol):
    """How a back end lays out pages; the pool counts them and never looks into what `allocate` returns."""

    def allocate(
        self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device
    ) -> Sequence[object]:
        """Storage for `num_pages` pages of `page_size` tokens: one opaque object per layer."""
        ...

    def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots `sources` [n] of one layer to slots `targets` [n], reading all before writing any."""


class KVPool(Protocol):
    """The pool as a back end sees it: slot s lies in page `s // page_size` at offset `s % page_size`."""

    page_size: int
    spec: KVSpec

    def layer(self, layer_id: int) -> object:
        """The object that this back end's layout made for the layer."""
        ...


class AttentionBackend(ABC):
    """Plan once per batch, run once per layer."""

    kv_layout: KVLayout

    @abstractmethod
    def __init__(self, pool: KVPool, req_to_token: torch.Tensor) -> None:
        """A back end over one pool and the table of slots [request rows, context]."""

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan: everything that depends on the batch alone, computed once before the first layer."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        """Run: store k, v of the new tokens, attend, return [num_tokens, num_heads * head_dim].

        q is [num_tokens, num_heads, head_dim], k and v are [num_tokens, num_kv_heads, head_dim].
        """

"""Owns what an attention back end is: its plans, the page layout it chooses, and the pool as it sees it.

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
    """What one rank caches per token: its share of the heads, for all its layers, kept in `dtype`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class KVLayout(Protocol):
    """How a back end lays out pages; the pool counts them and never looks into what `allocate` returns."""

    def allocate(
        self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device
    ) -> Sequence[object]:
        """Storage for `num_pages` pages of `page_size` tokens: one opaque object per layer."""
        ...

    def bytes_per_token(self, spec: KVSpec) -> int:
        """Bytes of keys and values of one token over all layers, with what fills them up and their scales."""
        ...

    def read(self, layer: object, slots: torch.Tensor, head_dim: int) -> torch.Tensor:
        """What lies in slots [n] of one layer, as [2 * kv heads, n, head_dim]: keys, then values; a copy.

        Of whole numbers with a scale the numbers they stand for, float32.
        """
        ...

    def write(self, layer: object, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Set slots [n], each named once, to rows [2 * kv heads, n, head_dim], as `read` gives them."""
        ...

    def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots `sources` [n] to slots `targets` [n], bit for bit; a slot may be in both."""


class KVPool(Protocol):
    """The pool as a back end sees it: slot s lies in page `s // page_size` at offset `s % page_size`."""

    page_size: int
    spec: KVSpec

    def layer(self, layer_id: int) -> object:
        """The object that this back end's layout made for the layer."""
        ...


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a plan with fixed addresses serves: batches of `num_requests` requests of `width` rows each.

    Each request has at most `max_len` keys, with those of the batch.
    """

    num_requests: int
    width: int
    max_len: int


class Plan:
    """What a back end knows of one batch before its first layer; only the back end that made it looks inside.

    A plan made for a `PlanShape` keeps its addresses for life: a recorded graph may read it.
    """

    __slots__ = ()


class AttentionBackend(ABC):
    """Plan once per batch, run once per layer.

    One function fills every plan, whether a graph reads it or not, so that no value can be fresh in one and
    stale in the other.
    """

    kv_layout: KVLayout

    @abstractmethod
    def __init__(self, pool: KVPool, req_to_token: torch.Tensor) -> None:
        """A back end over one pool and the table of slots [request rows, context]."""

    @abstractmethod
    def make_plan(self, shape: PlanShape | None = None) -> Plan:
        """An empty plan: with a shape one for graphs, else one that takes any batch and moves with it."""

    @abstractmethod
    def part_of_plan(self, plan: Plan, num_requests: int) -> Plan:
        """The first requests of a plan for graphs, as a plan over the same memory."""

    @abstractmethod
    def fill(self, plan: Plan, batch: ForwardBatch) -> None:
        """Write everything that depends on the batch alone; lengths come from its host list.

        `RuntimeError` for a batch that the shape of the plan has no room for. A part of a plan shares its
        memory: filling the one spoils the other.
        """

    @abstractmethod
    def set_tail_mask(self, plan: Plan, tail_mask: torch.Tensor) -> None:
        """Replace what `SpecInput.tail_mask` said of the batch in a plan for graphs; may be captured.

        For drafts that choose their branches inside a graph. tail_mask is [requests, width, tail] bool.
        """

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, plan: Plan
    ) -> torch.Tensor:
        """Run: store k, v of the new tokens, attend, return [num_tokens, num_heads * head_dim].

        q is [num_tokens, num_heads, head_dim], k and v are [num_tokens, num_kv_heads, head_dim].
        """

    def padded_seq_len(self, width: int) -> int:
        """Keys of a request that only fills a batch up: as many as it has rows, so that each sees one."""
        return width

    @property
    def eager_plan(self) -> Plan:
        """The plan of forwards that no graph runs."""
        if self._eager_plan is None:
            self._eager_plan = self.make_plan()
        return self._eager_plan

    _eager_plan: Plan | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Fill the plan of eager forwards; it holds until the next batch."""
        self.fill(self.eager_plan, batch)
        return self.eager_plan

"""Owns the two tables of the cache: which slots a request has, and the storage that the slots point into.

Read by the model runner and the attention back ends (storage) and by the scheduler (rows). It must not decide
who gets a slot: the allocator does. Nor may it know how a page is laid out: the back end's layout does.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import KVLayout, KVSpec
from sglang.srt.mem_cache.allocator.base import RESERVED_PAGES


class ReqToTokenPool:
    """`req_to_token[req_pool_idx, t]` is the slot of token t of the request that holds this row.

    The scheduler plans on the host: `host` is the same table as a numpy array. On a CPU device both share
    their memory; elsewhere `write` copies what changed. Row `spare_row` belongs to no request and stays 0:
    requests that only fill up a recorded batch read it.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str = "cpu") -> None:
        if size < 1 or max_context_len < 1:
            raise ValueError(
                f"a request table needs size >= 1 and max_context_len >= 1, got {size} and {max_context_len}"
            )
        self.size = self.spare_row = size
        self.host: np.ndarray = np.zeros((size + 1, max_context_len), dtype=np.int64)
        host_tensor = torch.from_numpy(self.host)
        self._shared = torch.device(device).type == "cpu"
        self.req_to_token: torch.Tensor = host_tensor if self._shared else host_tensor.to(device)
        self._free: list[int] = list(range(size))  # a heap: the lowest row first, so that runs repeat exactly
        self._taken = [False] * size

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """A free row, the lowest; None when all are taken."""
        if not self._free:
            return None
        req_pool_idx = heapq.heappop(self._free)
        self._taken[req_pool_idx] = True
        return req_pool_idx

    def free(self, req_pool_idx: int) -> None:
        if not 0 <= req_pool_idx < self.size or not self._taken[req_pool_idx]:
            raise RuntimeError(
                f"request row {req_pool_idx} was freed but nobody holds it (there are {self.size} rows)"
            )
        self._taken[req_pool_idx] = False
        heapq.heappush(self._free, req_pool_idx)

    def write(self, req_pool_idx: int, start: int, slots: np.ndarray) -> None:
        """Slots of the tokens `start, start + 1, ...` of one request."""
        tokens = slice(start, start + len(slots))
        self.host[req_pool_idx, tokens] = slots
        if not self._shared:
            self.req_to_token[req_pool_idx, tokens] = torch.from_numpy(slots).to(self.req_to_token.device)

    def write_many(self, req_pool_indices: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Slots of several requests (a decode step): one for each row and position."""
        self.host[req_pool_indices, positions] = slots
        if not self._shared:
            device = self.req_to_token.device
            at = torch.from_numpy(req_pool_indices).to(device), torch.from_numpy(positions).to(device)
            self.req_to_token[at] = torch.from_numpy(slots).to(device)


class PagedKVPool:
    """Storage for `num_pages` pages of `page_size` tokens and the reserved page 0, one object a layer.

    Slot s lies in page `s // page_size` at offset `s % page_size`; slots of real tokens start at `page_size`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layout: KVLayout,
        spec: KVSpec,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"a KV pool needs num_pages >= 1 and page_size >= 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.spec = spec
        self.device = torch.device(device)
        self._layout = layout
        self._layers = layout.allocate(spec, num_pages + RESERVED_PAGES, page_size, self.device)
        if len(self._layers) != spec.num_layers:
            raise RuntimeError(
                f"the layout made storage for {len(self._layers)} layers, the model has {spec.num_layers}"
            )

    @property
    def size(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size

    def layer(self, layer_id: int) -> object:
        """What the layout made for this layer; only the back end that owns the layout looks inside."""
        return self._layers[layer_id]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy what lies in slots `sources` [n] to slots `targets` [n]; a slot may be in both."""
        for layer in self._layers:
            self._layout.move(layer, sources, targets)

    def read(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Keys and values in slots [n] of a layer, [2 * kv heads, n, head_dim]: for who is no back end.

        Of the pool's dtype, or float32 where that is of whole numbers.
        """
        return self._layout.read(self._layers[layer_id], slots, self.spec.head_dim)

    def write(self, layer_id: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Set slots [n] of a layer, each named once, to rows [2 * kv heads, n, head_dim]."""
        self._layout.write(self._layers[layer_id], slots, rows)

"""Owns the prefix cache: a radix tree over token ids in whole pages, one tree for each `extra_key`.

Read and fed by `request_kv.py`. It must not know requests or pools: it is given slots and says which ones it
frees. Uses are counted, not timed, so that the same requests always evict the same nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheNode,
    InsertResult,
    PrefixMatch,
    common_prefix_length,
)
from sglang.srt.mem_cache.evict_policy import EvictPolicy, make_evict_policy

_NOTHING = np.zeros(0, dtype=np.int64)
_ID_BYTES = _NOTHING.itemsize


class _Node(CacheNode):
    """One edge and its lower end: `ids` follow the parent's, `slots[i]` holds the cached token `ids[i]`."""

    __slots__ = ("children", "ids", "in_heap", "last_use", "locks", "namespace", "parent", "slots")

    def __init__(
        self, parent: _Node | None, namespace: str | None, ids: np.ndarray, slots: np.ndarray, last_use: int
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.ids = ids
        self.slots = slots
        self.children: dict[bytes, _Node] = {}
        self.locks = 0
        self.last_use = last_use
        self.in_heap = False


def _up_from(node: CacheNode | None) -> Iterator[_Node]:
    """The nodes from a handle up, without the root, which holds nothing."""
    while isinstance(node, _Node) and node.parent is not None:
        yield node
        node = node.parent


class RadixCache(BasePrefixCache):
    """A tree that gives up its leaves in the order of a policy.

    A leaf under no lock is in a heap, at most once; its priority there may be out of date, never too large.
    """

    keeps = True

    def __init__(self, page_size: int, policy: EvictPolicy | None = None) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * _ID_BYTES
        self._priority = policy or make_evict_policy("lru")
        self._clock = 0
        self._evictable = 0
        self._protected = 0
        self._roots: dict[str | None, _Node] = {}
        self._heap: list[tuple[tuple[int, ...], int, _Node]] = []
        self._pushes = 0  # breaks ties, so that nodes themselves are never compared

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def match_prefix(self, extra_key: str | None, token_ids: np.ndarray) -> PrefixMatch:
        root = self._roots.get(extra_key)
        if root is None:
            return PrefixMatch(_NOTHING, None)
        node, pieces = self._descend(root, self._whole_pages(token_ids))
        if not pieces:
            return PrefixMatch(_NOTHING, None)
        return PrefixMatch(pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces), node)

    def insert(self, extra_key: str | None, token_ids: np.ndarray, slots: np.ndarray) -> InsertResult:
        ids = self._whole_pages(token_ids)
        if len(ids) == 0:
            return InsertResult(0, None)
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = _Node(None, extra_key, _NOTHING, _NOTHING, 0)
        node, pieces = self._descend(root, ids)
        existing = sum(map(len, pieces))
        if existing < len(ids):
            rest = ids[existing:]
            # Copies: the caller's arrays may be views of its table.
            leaf = _Node(node, extra_key, rest.copy(), slots[existing : len(ids)].copy(), self._clock)
            node.children[self._page_key(rest)] = leaf
            self._evictable += len(rest)
            node = leaf
            self._offer(leaf)
        return InsertResult(existing, node)

    def lock(self, node: CacheNode | None) -> None:
        for part in _up_from(node):
            if part.locks == 0:
                self._evictable -= len(part.ids)
                self._protected += len(part.ids)
            part.locks += 1

    def unlock(self, node: CacheNode | None) -> None:
        for part in _up_from(node):
            if part.locks == 0:
                raise RuntimeError(
                    f"a cached prefix of {len(part.ids)} tokens was unlocked but nobody holds it"
                )
            part.locks -= 1
            if part.locks == 0:
                self._protected -= len(part.ids)
                self._evictable += len(part.ids)
                self._offer(part)

    def evict(self, num_tokens: int) -> np.ndarray:
        freed: list[np.ndarray] = []
        missing = num_tokens
        while missing > 0 and self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not self._is_free_leaf(node):
                continue  # it is offered again when it becomes a free leaf
            if priority != self._priority(node):
                self._offer(node)  # used since it was pushed
                continue
            count = min(len(node.ids), -(-missing // self.page_size) * self.page_size)
            freed.append(self._drop_tail(node, count))
            missing -= count
        return np.concatenate(freed) if freed else _NOTHING

    def clear(self) -> np.ndarray:
        if self._protected:
            raise RuntimeError(
                f"the prefix cache cannot be cleared while {self._protected} of its tokens are in use"
            )
        slots = [node.slots for node in self.nodes()]
        self._roots.clear()
        self._heap.clear()
        self._evictable = 0
        return np.concatenate(slots) if slots else _NOTHING

    def nodes(self) -> Iterator[_Node]:
        """Every node but the roots (checks and tests walk this)."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _whole_pages(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids[: len(token_ids) // self.page_size * self.page_size]

    def _page_key(self, ids: np.ndarray) -> bytes:
        """Key of an edge among its siblings: its first page."""
        return ids[: self.page_size].tobytes()

    def _descend(self, node: _Node, ids: np.ndarray) -> tuple[_Node, list[np.ndarray]]:
        """Follow `ids` (whole pages) as far as they are cached; an edge left midway is split there.

        Each id is looked at a fixed number of times, however many edges they lie on. Edges are mostly short,
        so they are compared as bytes: many times cheaper than a comparison of two small arrays.
        """
        self._clock += 1
        pieces: list[np.ndarray] = []
        text, at = ids.tobytes(), 0
        while at < len(text):
            child = node.children.get(text[at : at + self._page_bytes])
            if child is None:
                break
            if not text.startswith(child.ids.tobytes(), at):
                common = common_prefix_length(child.ids, ids[at // _ID_BYTES :])
                child = self._split(child, common // self.page_size * self.page_size)
            child.last_use = self._clock
            pieces.append(child.slots)
            node = child
            at += len(child.ids) * _ID_BYTES
        return node, pieces

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a new node above `node` that takes its first `at` tokens.

        `node` stays the lower end, so handles keep their meaning.
        """
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.namespace, node.ids[:at], node.slots[:at], node.last_use)
        upper.locks = node.locks
        parent.children[self._page_key(node.ids)] = upper
        node.ids = node.ids[at:]
        node.slots = node.slots[at:]
        node.parent = upper
        upper.children[self._page_key(node.ids)] = node
        return upper

    def _is_free_leaf(self, node: _Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: _Node) -> None:
        """Put a free leaf into the heap, unless it is there."""
        if not node.in_heap and self._is_free_leaf(node):
            node.in_heap = True
            self._pushes += 1
            heapq.heappush(self._heap, (self._priority(node), self._pushes, node))

    def _drop_tail(self, node: _Node, count: int) -> np.ndarray:
        """Forget the last `count` tokens of a free leaf.

        A leaf that is used up is unlinked, and so is an empty namespace.
        """
        keep = len(node.ids) - count
        freed = node.slots[keep:]
        self._evictable -= count
        if keep:
            node.ids = node.ids[:keep]
            node.slots = node.slots[:keep]
            self._offer(node)
            return freed
        parent = node.parent
        assert parent is not None
        del parent.children[self._page_key(node.ids)]
        node.parent = None
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.namespace]
        else:
            self._offer(parent)
        return freed

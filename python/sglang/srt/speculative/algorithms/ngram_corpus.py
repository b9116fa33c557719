"""Owns the n-grams of the text that was generated, in a trie of bounded size.

Written by the NGRAM drafter after each round and read by `ngram_tree.py`. Must not know requests: a window of
tokens goes in, and nothing of where it came from is kept. Order comes from the insertions alone, so ranks
that insert the same hold the same.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["NgramCorpus"]

_ROOT = 0
_NONE = -1
_TOKEN_BITS = 32


class NgramCorpus:
    """A trie of token n-grams up to `max_depth` long, of at most `capacity` nodes; a node ends one n-gram.

    Beyond the capacity the n-gram whose last walk is the longest ago goes, always a leaf. Nodes are numbers,
    and what belongs to them lies in flat arrays (about 250 bytes a node in all): objects by the million
    would make every collection of the garbage collector slow.
    """

    def __init__(self, *, max_depth: int, capacity: int) -> None:
        if max_depth < 2:
            raise ValueError(
                "--speculative-ngram-max-trie-depth must be 2 or more, a token and one that follows, and is "
                f"{max_depth}"
            )
        if capacity < max_depth:
            raise ValueError(
                "--speculative-ngram-capacity must reach --speculative-ngram-max-trie-depth, to hold one "
                f"n-gram of {max_depth} tokens, and is {capacity}; raise it or lower the depth"
            )
        self.max_depth = max_depth
        self._capacity = capacity
        # (parent node, token) -> node, the longest unused first. A walk renews the nodes of its path from
        # the end to the beginning, so a node stands behind all nodes below it: the first one is a leaf.
        self._node_of: OrderedDict[int, int] = OrderedDict()
        # By node. The children of a node are linked, the one walked last first.
        self._tokens = array("q", [0])
        self._counts = array("q", [0])
        self._followed = array("q", [0])  # sum of the counts of the children
        self._first_child = array("i", [_NONE])
        self._next_sibling = array("i", [_NONE])
        self._prev_sibling = array("i", [_NONE])
        self._free: list[int] = []

    def __len__(self) -> int:
        """The n-grams held, of all lengths."""
        return len(self._node_of)

    def insert(self, token_ids: Sequence[int], num_new: int) -> None:
        """Add the n-grams of a text that end in its last `num_new` tokens, 1 or more.

        `token_ids`, the newest last, needs `max_depth - 1` tokens before the new ones where the text has
        them; what is longer is not read. Each n-gram counts once for each time that it ends in a new token:
        one that is only walked through counts where it was not held at all.
        """
        window = list(token_ids[-(self.max_depth - 1 + num_new) :])
        first_new = len(window) - num_new
        for start in range(len(window)):
            self._walk(window[start : start + self.max_depth], first_new - start)
            while len(self._node_of) > self._capacity:
                self._evict()

    def anchors(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """The ends of a text that are held and were followed, as (node, length), the longest first."""
        found = []
        node_of = self._node_of
        window = list(token_ids[-(self.max_depth - 1) :])
        for start in range(len(window)):
            node = _ROOT
            for token_id in window[start:]:
                node = node_of.get(node << _TOKEN_BITS | token_id, _NONE)
                if node == _NONE:
                    break
            if node != _NONE and self._first_child[node] != _NONE:
                found.append((node, len(window) - start))
        return found

    def children(self, node: int, limit: int) -> Iterator[tuple[int, int, float]]:
        """Up to `limit` tokens that followed the n-gram of `node`, the last walked first.

        As (node, token, share): of all that followed, so often it was this token.
        """
        child = self._first_child[node]
        while child != _NONE and limit > 0:
            yield child, self._tokens[child], self._counts[child] / self._followed[node]
            child = self._next_sibling[child]
            limit -= 1

    def _walk(self, path: list[int], first_new: int) -> None:
        """Walk down `path`, adding what is missing; tokens from index `first_new` on count."""
        node_of, first_child = self._node_of, self._first_child
        keys = []
        node = _ROOT
        for index, token_id in enumerate(path):
            key = node << _TOKEN_BITS | token_id
            keys.append(key)
            child = node_of.get(key)
            is_new = child is None
            if child is None:
                node_of[key] = child = self._new_node(token_id)
                self._link(node, child)
            elif first_child[node] != child:
                self._unlink(node, child)
                self._link(node, child)
            if is_new or index >= first_new:
                self._counts[child] += 1
                self._followed[node] += 1
            node = child
        renew = node_of.move_to_end
        for key in reversed(keys):
            renew(key)

    def _evict(self) -> None:
        key, node = self._node_of.popitem(last=False)
        parent = key >> _TOKEN_BITS
        self._unlink(parent, node)
        self._followed[parent] -= self._counts[node]
        self._free.append(node)

    def _new_node(self, token_id: int) -> int:
        if self._free:
            node = self._free.pop()
            self._tokens[node], self._counts[node], self._followed[node] = token_id, 0, 0
            return node
        self._tokens.append(token_id)
        for numbers in (self._counts, self._followed):
            numbers.append(0)
        for links in (self._first_child, self._next_sibling, self._prev_sibling):
            links.append(_NONE)
        return len(self._tokens) - 1

    def _link(self, parent: int, child: int) -> None:
        """Make `child` the first child."""
        second = self._first_child[parent]
        self._first_child[parent] = child
        self._prev_sibling[child], self._next_sibling[child] = _NONE, second
        if second != _NONE:
            self._prev_sibling[second] = child

    def _unlink(self, parent: int, child: int) -> None:
        before, after = self._prev_sibling[child], self._next_sibling[child]
        if before == _NONE:
            self._first_child[parent] = after
        else:
            self._next_sibling[before] = after
        if after != _NONE:
            self._prev_sibling[after] = before

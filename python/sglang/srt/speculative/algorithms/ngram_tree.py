"""Owns how a match in the n-gram corpus becomes the tree that is verified.

Read by the NGRAM drafter, for one request at a time. Must not write the corpus: a tree depends on what was
inserted and on nothing else, so ranks that insert the same propose the same.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Sequence

from sglang.srt.speculative.algorithms.ngram_corpus import NgramCorpus

__all__ = ["MatchType", "NgramTrees"]

#: What fills a tree up to its size, under the root: verified like any node, and kept if the target says so.
_PADDING_TOKEN = 0


class MatchType(enum.Enum):
    """Which continuations come first: the latest ones level by level, or the most frequent ones."""

    BFS = "BFS"
    PROB = "PROB"


class NgramTrees:
    """Proposes a tree of exactly `num_nodes` nodes (N) for a text, from what followed the ends of it before.

    Each end of the text that the corpus holds is an anchor, the longest first; below all of them the trie is
    searched, and equal continuations of several anchors are one node. Of what followed an n-gram the tokens
    walked last are looked at: `max_breadth` after one token, fewer in equal steps down to `min_breadth`
    after the longest n-gram, because what a long n-gram says is sure and what a short one says is not.
    """

    def __init__(
        self,
        corpus: NgramCorpus,
        *,
        num_nodes: int,
        match_type: MatchType,
        min_breadth: int,
        max_breadth: int,
    ) -> None:
        if num_nodes < 2:
            raise ValueError(
                f"--speculative-num-draft-tokens must be 2 or more to draft with, and is {num_nodes}"
            )
        if not 1 <= min_breadth <= max_breadth:
            raise ValueError(
                "--speculative-ngram-min-bfs-breadth must be 1 or more, and not above "
                f"--speculative-ngram-max-bfs-breadth; they are {min_breadth} and {max_breadth}"
            )
        self._corpus = corpus
        self._num_nodes = num_nodes
        self._match_type = match_type
        longest = corpus.max_depth - 1
        steps = max(longest - 1, 1)
        #: By the length of the n-gram that is continued.
        self._breadth = [0] + [
            max_breadth - (max_breadth - min_breadth) * (length - 1) // steps
            for length in range(1, longest + 1)
        ]

    def propose(
        self, token_ids: Sequence[int], *, first: Sequence[int] = (), least_match: int = 1
    ) -> tuple[list[int], list[int]] | None:
        """The tree after a text, which is not empty: (token_ids [N], parents [N]) in breadth-first order.

        The root is the last token of the text. The last `max_depth - 1` tokens are read. `first` are tokens
        that are proposed before anything else, as a chain of at most N - 1; without them None where no end of
        the text of `least_match` tokens or more is held (1: a tree in any case).
        """
        anchors = self._corpus.anchors(token_ids)
        if least_match > 1 and not first and (not anchors or anchors[0][1] < least_match):
            return None
        tree = _GrowingTree(token_ids[-1], self._num_nodes)
        parent = 0
        for token_id in first:
            parent = tree.child(parent, token_id)
        if tree.is_full:
            pass
        elif self._match_type is MatchType.BFS:
            self._grow_by_level(tree, anchors)
        else:
            self._grow_by_share(tree, anchors)
        return tree.in_breadth_first_order()

    def _grow_by_level(self, tree: _GrowingTree, anchors: list[tuple[int, int]]) -> None:
        """Anchor by anchor, level by level, the continuation walked last first."""
        for anchor, length in anchors:
            queue = deque([(anchor, length, 0)])
            while queue:
                at, length, parent = queue.popleft()
                if length == self._corpus.max_depth:
                    continue
                for child, token_id, _ in self._corpus.children(at, self._breadth[length]):
                    queue.append((child, length + 1, tree.child(parent, token_id)))
                    if tree.is_full:
                        return

    def _grow_by_share(self, tree: _GrowingTree, anchors: list[tuple[int, int]]) -> None:
        """All anchors at once, the continuation with the highest product of shares first.

        Of equals the one of the longer anchor, then the one met first.
        """
        heap: list[tuple[float, int, int, int, int, int, int]] = []
        num_met = 0

        def meet(at: int, length: int, parent: int, share: float, order: int) -> None:
            nonlocal num_met
            if length == self._corpus.max_depth:
                return
            for child, token_id, part in self._corpus.children(at, self._breadth[length]):
                num_met += 1
                heapq.heappush(heap, (-share * part, order, num_met, child, length + 1, parent, token_id))

        for order, (anchor, length) in enumerate(anchors):
            meet(anchor, length, 0, 1.0, order)
        while heap and not tree.is_full:
            negative_share, order, _, at, length, parent, token_id = heapq.heappop(heap)
            meet(at, length, tree.child(parent, token_id), -negative_share, order)


class _GrowingTree:
    """Nodes in the order they were found; node 0 is the root."""

    def __init__(self, root_id: int, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._token_ids = [root_id]
        self._children: list[list[int]] = [[]]
        self._node_of: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self._token_ids) == self._num_nodes

    def child(self, parent: int, token_id: int) -> int:
        """The node of this continuation, added where the tree does not have it."""
        node = self._node_of.get((parent, token_id))
        if node is None:
            node = self._node_of[parent, token_id] = self._add(parent, token_id)
        return node

    def in_breadth_first_order(self) -> tuple[list[int], list[int]]:
        """Tokens and parents, filled up to the size with dummy nodes under the root."""
        while not self.is_full:
            self._add(0, _PADDING_TOKEN)
        order, parents = [0], [-1]
        for place, node in enumerate(order):  # which grows meanwhile
            order += self._children[node]
            parents += [place] * len(self._children[node])
        return [self._token_ids[node] for node in order], parents

    def _add(self, parent: int, token_id: int) -> int:
        node = len(self._token_ids)
        self._token_ids.append(token_id)
        self._children.append([])
        self._children[parent].append(node)
        return node

"""Owns how a draft's distributions become trees to verify: a beam over depths, then the best nodes of it.

Read by the drafters with a model, which run one draft forward a level. Must not run a model, hold slots or
know requests: tensors go in and come out. With one branch a level the tree is a chain, and no probability is
read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.kernels.draft_trees import choose_nodes, grow_level, no_candidates, root_frontier
from sglang.srt.batch.spec_input import DraftTree

__all__ = ["DraftBeam", "DraftShape", "Frontier"]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How a round drafts.

    `topk` (k): branches a node. `num_steps` (S): levels. `num_nodes` (N): nodes verified, with the root.
    With k = 1, N = S + 1. With k > 1 there are k candidates on level 1 and k * k on each further level, and a
    tree has as many nodes as asked only where they suffice: N <= 1 + k + (S - 1) * k * k.
    """

    topk: int
    num_steps: int
    num_nodes: int

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("eagle-topk", self.topk, 1),
            ("num-steps", self.num_steps, 1),
            ("num-draft-tokens", self.num_nodes, 2),
        ):
            if value < least:
                raise ValueError(
                    f"--speculative-{flag} must be {least} or more to draft with, and is {value}"
                )
        if self.topk == 1 and self.num_nodes != self.num_steps + 1:
            raise ValueError(
                "--speculative-num-draft-tokens must be --speculative-num-steps + 1 with one branch a step: "
                f"{self.num_steps + 1}, and is {self.num_nodes}"
            )
        if self.num_nodes > self.max_nodes:
            raise ValueError(
                f"--speculative-num-draft-tokens must be {self.max_nodes} or less, and is {self.num_nodes}: "
                f"--speculative-eagle-topk {self.topk} and --speculative-num-steps {self.num_steps} give "
                "1 + topk + (steps - 1) * topk * topk nodes; lower it or raise one of them"
            )

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def max_nodes(self) -> int:
        """The root and every candidate of every level."""
        return 1 + self.topk + (self.num_steps - 1) * self.topk * self.topk


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level that the next draft forward runs over, with what it needs beside them.

    The first frontier is the root alone; `rows` is 1 there and k after it.
    """

    token_ids: torch.Tensor  # [batch, rows] int64
    #: [batch, rows] int64: the parent of each node, as a row of the forward before: its output goes on here.
    parent_rows: torch.Tensor
    #: [batch, rows, tail] bool over the draft rows written so far, level after level, the last ones being the
    #: frontier's own: a node sees itself and its ancestors. None (a chain, the root): plain causal attention.
    tail_mask: torch.Tensor | None


class DraftBeam:
    """Grows one tree for each request of a batch, level by level.

    Expansion and reranking of EAGLE-2 (arXiv 2406.16858, section 4). `frontier` is what the next draft
    forward runs over. Its output, the k best children of every row with their probabilities, goes into
    `grow`; after S levels `tree` gives the N best nodes. Equal scores go to the candidate recorded first, a
    parent before its children: so a child of probability 1 never displaces its parent.

    Candidates are numbered in the order they are recorded: level 1 is 0 .. k - 1, child j of frontier row r
    of level i >= 2 is k + (i - 2) * k * k + r * k + j. The tail lists, for every level, the rows of its
    frontier.

    Example, k = 2 and one request. Level 1 records candidates 0 (.6) and 1 (.4), both on the frontier. Their
    children 2, 3 (.5, .3 under 0) and 4, 5 (.9, .1 under 1) score .30, .18, .36, .04: the next frontier is
    4, 2 with parent rows 1, 0, and its tail mask over the four rows written is [[0, 1, 1, 0], [1, 0, 0, 1]].
    """

    def __init__(self, shape: DraftShape, root_ids: torch.Tensor, *, root_in_tail: bool = False) -> None:
        """Start at the root of each request, root_ids [batch].

        `root_in_tail`: the first draft forward runs over the roots themselves, so the tail begins with a row
        of the root, which every node sees. Otherwise level 1 comes from what the draft computed before.
        """
        self._shape = shape
        self._root_ids = root_ids
        self._num_levels = 0
        self._frontier = root_frontier(root_ids, is_in_tail=root_in_tail)
        if shape.is_chain:
            self._chain = [self._frontier.ids]
        else:
            self._candidates = no_candidates(root_ids.shape[0], shape.max_nodes - 1, root_ids.device)

    @property
    def frontier(self) -> Frontier:
        """What the next draft forward runs over; a chain and the root alone need no mask."""
        level = self._frontier
        has_mask = self._num_levels > 0 and not self._shape.is_chain
        return Frontier(level.ids, level.rows, level.seen if has_mask else None)

    def grow(self, token_ids: torch.Tensor, probs: torch.Tensor | None = None) -> None:
        """Add a level: the k best children of each frontier row, with probabilities; [batch * rows, k] both.

        A chain needs no probabilities. NaN counts as 0, and everything is held between 0 and 1: a broken
        draft proposes badly, it does not break the round.
        """
        if self._num_levels == self._shape.num_steps:
            raise RuntimeError(
                f"all {self._shape.num_steps} levels of the draft are there; take the tree first"
            )
        if probs is None and not self._shape.is_chain:
            raise RuntimeError(
                "a tree is chosen by probabilities; give those of the children with the tokens"
            )
        batch, rows = self._frontier.ids.shape
        topk = self._shape.topk
        first = 0 if self._num_levels == 0 else topk + (self._num_levels - 1) * topk * topk
        self._num_levels += 1
        if probs is None or self._shape.is_chain:
            self._frontier = self._frontier._replace(ids=token_ids.reshape(batch, 1))
            self._chain.append(self._frontier.ids)
            return
        token_ids, probs = token_ids.reshape(batch, rows, topk), probs.reshape(batch, rows, topk)
        self._frontier = grow_level(token_ids, probs, self._frontier, first, self._candidates)

    def tree(self) -> DraftTree:
        """The N - 1 candidates of the highest scores under each root, in the order they were recorded.

        A node scores at most what its parent does, and ties go to the earlier candidate, so every chosen
        node's parent is chosen too.
        """
        if self._num_levels < self._shape.num_steps:
            raise RuntimeError(
                f"a draft of {self._shape.num_steps} levels has {self._num_levels}; grow the others first"
            )
        if self._shape.is_chain:
            return DraftTree.chain(torch.cat(self._chain, dim=1))
        return DraftTree(*choose_nodes(self._root_ids, self._candidates, self._shape.num_nodes))

"""Owns trees of drafts as kernels: growing them, what each node sees, the greedy way down.

Read by the engine's operations on drafts, whose torch forms are the references, and by the tests, which hold
the kernels to plain loops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Candidates(NamedTuple):
    """All candidates of the trees of some requests, level by level; a parent is a candidate, -1 the root."""

    ids: torch.Tensor  # [requests, all] int64
    scores: torch.Tensor  # [requests, all] float32
    parents: torch.Tensor  # [requests, all] int64


class Level(NamedTuple):
    """The nodes that the next level hangs on."""

    ids: torch.Tensor  # [requests, rows] int64
    rows: torch.Tensor  # [requests, rows] int64: the parent of each, as a row of the level before
    candidates: torch.Tensor  # [requests, rows] int64: which candidate each is
    scores: torch.Tensor  # [requests, rows] float32
    seen: torch.Tensor  # [requests, rows, tail] bool: what each sees of the rows so far


def grow_level(
    token_ids: torch.Tensor, probs: torch.Tensor, level: Level, first: int, into: Candidates, topk: int
) -> Level:
    """Writes the children of a level into the candidates from `first` on; the best `topk` are the next level.

    token_ids and probs: [requests, rows * topk], int64 and float32, the children of each row side by side. A
    child scores its probability (held between 0 and 1, NaN is 0) times the score of its parent; of equal
    scores the earlier child is the better. Of the rows of the next level each sees what its parent sees, and
    itself.
    """
    batch, tail = level.seen.shape[0], level.seen.shape[2]
    ids = torch.empty(batch, topk, dtype=torch.int64)
    rows, candidates, scores = torch.empty_like(ids), torch.empty_like(ids), torch.empty(batch, topk)
    grown = Level(ids, rows, candidates, scores, torch.empty(batch, topk, tail + topk, dtype=torch.bool))
    torch.ops.sgl_kernel.grow_level(
        token_ids, probs, level.scores, level.candidates, level.seen, first, *into, *grown
    )
    return grown


def choose_nodes(
    root_ids: torch.Tensor, candidates: Candidates, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and parents, int64 [requests, num_nodes], of the root and the best candidates in their order.

    Of equal scores the earlier candidate is the better. A chosen candidate whose parent is not chosen hangs
    on the root.
    """
    ids = torch.empty(root_ids.shape[0], num_nodes, dtype=torch.int64)
    parents = torch.empty_like(ids)
    torch.ops.sgl_kernel.choose_nodes(root_ids, *candidates, ids, parents)
    return ids, parents


def tree_mask(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of trees, int64 [requests, nodes]: what each node sees, [requests, nodes, nodes] bool, and its depth.

    A node sees itself and its ancestors; parents stand before their children, a negative one ends a path.
    """
    batch, nodes = parents.shape
    mask, depths = torch.empty(batch, nodes, nodes, dtype=torch.bool), torch.empty_like(parents)
    torch.ops.sgl_kernel.tree_mask(parents, mask, depths)
    return mask, depths


def follow_best(
    logits: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, requests: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The way of the best tokens down trees, int64 [batch, nodes], of the requests that are named, int64.

    logits float32 [batch * nodes, vocab]: of each node. From the root on to the child that carries the best
    token of its parent, the first such one: the nodes and these tokens, int64 [requests, nodes]; and how many
    they are, with 1 where the logits of the next node are not finite, [requests, 2].
    """
    paths = torch.empty(requests.shape[0], token_ids.shape[1], dtype=torch.int64)
    drawn, ends = torch.empty_like(paths), torch.empty(requests.shape[0], 2, dtype=torch.int64)
    torch.ops.sgl_kernel.follow_best(logits, token_ids, parents, requests, paths, drawn, ends)
    return paths, drawn, ends


@torch.library.register_fake("sgl_kernel::grow_level")
def _grow_level_fake(
    token_ids: torch.Tensor,
    probs: torch.Tensor,
    frontier_scores: torch.Tensor,
    candidates: torch.Tensor,
    seen: torch.Tensor,
    first: int,
    *written: torch.Tensor,
) -> None:
    """Only writes into what follows `first`."""


@torch.library.register_fake("sgl_kernel::choose_nodes")
def _choose_nodes_fake(
    root_ids: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    node_ids: torch.Tensor,
    node_parents: torch.Tensor,
) -> None:
    """Only writes into `node_ids` and `node_parents`."""


@torch.library.register_fake("sgl_kernel::tree_mask")
def _tree_mask_fake(parents: torch.Tensor, mask: torch.Tensor, depths: torch.Tensor) -> None:
    """Only writes into `mask` and `depths`."""


@torch.library.register_fake("sgl_kernel::follow_best")
def _follow_best_fake(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    requests: torch.Tensor,
    paths: torch.Tensor,
    drawn: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Only writes into `paths`, `drawn` and `ends`."""

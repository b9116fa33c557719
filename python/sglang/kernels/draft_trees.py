"""Owns the arithmetic of draft trees: growing them level by level, choosing nodes, what each node sees.

Read by the beam of drafts and by the verification. It must not know requests or models: it takes tensors and
numbers. The torch forms are the definition; compiled kernels answer where they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from sglang.kernels.compiled import compiled_kernels

__all__ = [
    "BestPath",
    "CandidateNodes",
    "Frontier",
    "best_children",
    "choose_nodes",
    "follow_best",
    "grow_level",
    "no_candidates",
    "root_frontier",
    "tree_mask",
]


class CandidateNodes(NamedTuple):
    """All candidates of the trees of a batch, level by level; a parent is a candidate, -1 the root."""

    ids: torch.Tensor  # [batch, all] int64
    scores: torch.Tensor  # [batch, all] float32
    parents: torch.Tensor  # [batch, all] int64


class Frontier(NamedTuple):
    """The nodes of one level that the next one hangs on."""

    ids: torch.Tensor  # [batch, rows] int64
    rows: torch.Tensor  # [batch, rows] int64: the parent of each, as a row of the frontier before
    candidates: torch.Tensor  # [batch, rows] int64: which candidate each is
    scores: torch.Tensor  # [batch, rows] float32
    seen: torch.Tensor  # [batch, rows, tail] bool: what each sees of the rows of all frontiers so far


class BestPath(NamedTuple):
    """The nodes of a path, and the token that each of them gave; failed: the next node gave none."""

    nodes: list[int]
    token_ids: list[int]
    failed: bool


def no_candidates(batch: int, count: int, device: torch.device) -> CandidateNodes:
    """Room for `count` candidates of each request."""
    ids = torch.empty(batch, count, dtype=torch.int64, device=device)
    return CandidateNodes(ids, torch.empty(batch, count, device=device), torch.empty_like(ids))


def root_frontier(root_ids: torch.Tensor, *, is_in_tail: bool) -> Frontier:
    """The root of each request, root_ids [batch]; `is_in_tail`: it is a row that its descendants see."""
    batch, device = root_ids.shape[0], root_ids.device
    rows = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    seen = torch.ones(batch, 1, int(is_in_tail), dtype=torch.bool, device=device)
    return Frontier(root_ids[:, None], rows, rows - 1, torch.ones(batch, 1, device=device), seen)


def best_children(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` most likely ids of each row of logits [rows, vocab], with probabilities: [rows, topk]."""
    kernels = _kernels(logits)
    if kernels is not None and logits.dtype == torch.float32 and logits.stride(-1) == 1:
        ids, probs = kernels.logprobs.top_probs(logits, topk)
        return ids, probs
    best = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    return best.indices, best.values


def grow_level(
    token_ids: torch.Tensor, probs: torch.Tensor, frontier: Frontier, first: int, into: CandidateNodes
) -> Frontier:
    """Enter the children of a frontier into the candidates from `first` on; the k best are the next frontier.

    token_ids and probs [batch, rows, k]: the children of each row. A child scores its probability (held
    between 0 and 1, NaN is 0) times its parent's score. Equal scores go to the earlier child.
    """
    batch, rows, topk = token_ids.shape
    token_ids = token_ids.reshape(batch, rows * topk).contiguous()
    probs = probs.reshape(batch, rows * topk).float().contiguous()
    kernels = _kernels(token_ids)
    if kernels is not None:
        grown = kernels.trees.grow_level(token_ids, probs, frontier, first, into, topk)
        return Frontier(*grown)
    level = slice(first, first + rows * topk)
    scores = frontier.scores.repeat_interleave(topk, dim=1) * probs.nan_to_num(nan=0.0).clamp(0.0, 1.0)
    into.ids[:, level], into.scores[:, level] = token_ids, scores
    into.parents[:, level] = frontier.candidates.repeat_interleave(topk, dim=1)
    best = _best(scores, topk)  # [batch, k], in the level
    at = best // topk
    inherited = frontier.seen.gather(1, at[:, :, None].expand(-1, -1, frontier.seen.shape[2]))
    itself = torch.eye(topk, dtype=torch.bool, device=token_ids.device).expand(batch, topk, topk)
    return Frontier(
        token_ids.gather(1, best),
        at,
        best + first,
        scores.gather(1, best),
        torch.cat([inherited, itself], dim=2),
    )


def choose_nodes(
    root_ids: torch.Tensor, candidates: CandidateNodes, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and parents [batch, num_nodes]: the root, and the best candidates in the order they were recorded.

    Equal scores go to the earlier candidate. No node may score more than its parent does: then every chosen
    node's parent is chosen too.
    """
    kernels = _kernels(root_ids)
    if kernels is not None:
        ids, parents = kernels.trees.choose_nodes(root_ids.contiguous(), candidates, num_nodes)
        return ids, parents
    batch, num_candidates = candidates.ids.shape
    chosen = _best(candidates.scores, num_nodes - 1).sort(dim=1).values
    # Candidate -> node, shifted by one so that the root, candidate -1, is node 0.
    nodes = torch.arange(1, num_nodes, device=root_ids.device)
    node_of = torch.zeros(batch, num_candidates + 1, dtype=torch.int64, device=root_ids.device)
    node_of.scatter_(1, chosen + 1, nodes.expand(batch, -1))
    above = node_of.gather(1, candidates.parents.gather(1, chosen) + 1)
    return (
        torch.cat([root_ids[:, None], candidates.ids.gather(1, chosen)], dim=1),
        torch.cat([torch.full_like(root_ids[:, None], -1), above], dim=1),
    )


def tree_mask(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each node of trees [batch, N] sees of its own tree, [batch, N, N] bool, and its depth, [batch, N].

    True at [b, i, j] where j is i or one of its ancestors; a root, whose parent is negative, has depth 0.
    Parents stand before their children. This is the closure of the parent links: squaring "itself or its
    parent" doubles the distance that it covers.
    """
    kernels = _kernels(parents)
    if kernels is not None:
        mask, depths = kernels.trees.tree_mask(parents.contiguous())
        return mask, depths
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    seen = (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
    distance = 1
    while distance < num_nodes - 1:
        seen = torch.bmm(seen.float(), seen.float()) > 0
        distance *= 2
    return seen, seen.sum(dim=-1) - 1


def follow_best(
    logits: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, requests: Sequence[int]
) -> list[BestPath]:
    """The greedy way down the trees of some requests, from the root to the child that carries the best token.

    logits [batch * N, vocab], float32: row b * N + i for node i of request b; trees [batch, N]. Of several
    children with that token the first one counts.
    """
    batch, num_nodes = token_ids.shape
    kernels = _kernels(logits)
    if kernels is not None and logits.dtype == torch.float32 and logits.stride(-1) == 1:
        who = torch.tensor(requests, dtype=torch.int64)
        found = kernels.trees.follow_best(logits, token_ids.contiguous(), parents.contiguous(), who)
        paths, drawn, ends = (part.tolist() for part in found)
        return [
            BestPath(path[:length], ids[:length], bool(failed))
            for path, ids, (length, failed) in zip(paths, drawn, ends, strict=True)
        ]
    best = logits.argmax(dim=-1).view(batch, num_nodes).tolist()
    finite = torch.isfinite(logits.sum(dim=-1)).view(batch, num_nodes).tolist()
    ids, links = token_ids.tolist(), parents.tolist()
    return [_follow_one(best[b], finite[b], ids[b], links[b]) for b in requests]


def _follow_one(best: list[int], finite: list[bool], token_ids: list[int], parents: list[int]) -> BestPath:
    path: list[int] = []
    node: int | None = 0
    while node is not None and finite[node]:
        path.append(node)
        step = (node, best[node])
        node = next((i for i, link in enumerate(zip(parents, token_ids, strict=True)) if link == step), None)
    return BestPath(path, [best[i] for i in path], node is not None)


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    return compiled_kernels() if tensor.device.type == "cpu" else None


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [batch, count] of the highest of scores [batch, n], best first; the smaller index of equals.

    A sort, because torch.topk promises no order among equals.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]

"""Owns the tree of a round in plain torch: beam expansion by a draft, each branch over its true ancestors.

Read by the evaluation and its tests. It is the training side's own form of what the engine serves; it must
not know texts or acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train_draft.network import DraftNetwork, KeysValues, attend


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`steps` levels, `topk` branches a level, `nodes` in all with the root."""

    steps: int
    topk: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Tree:
    """The chosen nodes below the root: target ids [batch, nodes - 1] and parents, -1 for the root.

    A parent is an index into the same nodes and stands before its children.
    """

    tokens: Tensor
    parents: Tensor


def best_first(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the highest scores, the best first; ties go to the smaller index."""
    if count > scores.shape[-1]:
        raise ValueError(f"{count} of {scores.shape[-1]} scores are asked for; ask for fewer")
    # argmax names the first of equal values, and topk names any of them.
    left = scores.clone()
    chosen = []
    for _ in range(count):
        chosen.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, chosen[-1], float("-inf"))
    return torch.cat(chosen, dim=-1)


@torch.inference_mode()
def expand(
    network: DraftNetwork,
    tokens_of: Tensor,
    stream: Tensor,
    newest: Tensor,
    prefix: KeysValues,
    shape: TreeShape,
) -> Tree:
    """One tree for each row of a batch.

    `stream` [batch, H] is the draft's output at its newest true row `newest` [batch], `prefix` its keys and
    values (rows above `newest` are not looked at), `tokens_of` [draft_vocab] the target ids of draft ids.
    """
    batch, topk = len(newest), shape.topk
    visible = torch.arange(prefix.keys.shape[1]) <= newest[:, None, None]
    visible = visible.expand(batch, topk, -1)
    chances = network.logits(stream).softmax(-1)
    best = best_first(chances, topk)
    tokens, scores = tokens_of[best], chances.gather(-1, best)  # the frontier, [batch, topk]
    hidden = stream[:, None].expand(-1, topk, -1)
    places = torch.arange(topk).expand(batch, -1)  # the frontier's numbers among all candidates
    own: list[KeysValues] = []
    all_tokens, all_scores, all_parents = [tokens], [scores], [torch.full_like(places, -1)]
    for level in range(1, shape.steps):
        inputs = network.layer_inputs(tokens, hidden)
        positions = (newest[:, None] + level).expand(-1, topk)
        own.append(network.keys_values(inputs, positions))
        attended = attend(network.queries(inputs, positions), prefix, visible, own)
        hidden = network.finish(hidden, attended)
        chances = network.logits(hidden).softmax(-1)
        best = best_first(chances, topk)
        child_scores = (scores[:, :, None] * chances.gather(-1, best)).flatten(1)
        child_tokens = tokens_of[best].flatten(1)
        first = sum(part.shape[1] for part in all_tokens)
        all_tokens.append(child_tokens)
        all_scores.append(child_scores)
        all_parents.append(places.repeat_interleave(topk, dim=1))
        chosen = best_first(child_scores, topk)
        parent = chosen // topk
        tokens, scores = child_tokens.gather(1, chosen), child_scores.gather(1, chosen)
        hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
        # A branch takes its ancestors' keys along when it moves to another place.
        own = [known.at(parent) for known in own]
        places = first + chosen
    return _chosen(torch.cat(all_tokens, 1), torch.cat(all_scores, 1), torch.cat(all_parents, 1), shape)


def _chosen(tokens: Tensor, scores: Tensor, parents: Tensor, shape: TreeShape) -> Tree:
    """The best candidates of all levels, in their own order, so that parents stand before their children."""
    kept = best_first(scores, shape.nodes - 1).sort(-1).values
    kept_parents = parents.gather(1, kept)
    # A child's score is at most its parent's, and of equal ones the smaller number wins: no orphan.
    index = (kept[:, None, :] == kept_parents[:, :, None]).int().argmax(-1)
    return Tree(tokens.gather(1, kept), torch.where(kept_parents < 0, -1, index))

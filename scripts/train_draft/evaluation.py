"""Owns the judgement of a draft: accuracy at each depth, accept lengths by an exact walk over greedy texts.

Run by the training command on the held-out texts. It must not read any other text, and it never asks the
target: over a greedy text the target's answer at each position is the text itself, so a walk finds what a
server would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train_draft.draft_tree import Tree, TreeShape, expand
from train_draft.network import DraftNetwork, KeysValues
from train_draft.texts import Text
from train_draft.unroll import first_unroll, predicted_positions, unroll

CHAIN_STEPS = 3
TREE = TreeShape(steps=3, topk=4, nodes=8)
# Texts whose rounds are drafted side by side.
_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Judgement:
    """Figures of one set of texts. Lengths are tokens per verify round, the prefill's token not counted."""

    texts: int
    tokens: int
    accuracy: list[float]  # at depth 1, 2, 3
    chain_length: float
    tree_length: float
    coverage: float


@torch.inference_mode()
def judge(network: DraftNetwork, tokens_of: Tensor, texts: Sequence[Text], coverage: float) -> Judgement:
    """Judge a draft on greedy texts; `tokens_of` [draft_vocab] are the target ids of the draft ids."""
    texts = [text for text in texts if text.num_new > 1]
    if not texts:
        raise ValueError("no text is left to judge a draft on; generate longer or more texts")
    hits = [torch.zeros(0, dtype=torch.bool) for _ in range(CHAIN_STEPS)]
    chain, tree = Rounds(), Rounds()
    for first in range(0, len(texts), _TOGETHER):
        some = texts[first : first + _TOGETHER]
        right = right_guesses(network, tokens_of, some, CHAIN_STEPS)
        for depth, rows in enumerate(right):
            hits[depth] = torch.cat([hits[depth], *rows])
        for index, text in enumerate(some):
            chain.walk(text, [rows[index] for rows in right])
        walk_trees(network, tokens_of, some, TREE, tree)
    return Judgement(
        texts=len(texts),
        tokens=sum(text.num_new for text in texts),
        accuracy=[float(rows.float().mean()) for rows in hits],
        chain_length=chain.mean(),
        tree_length=tree.mean(),
        coverage=coverage,
    )


class Rounds:
    """Counts rounds and what they emit."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = 0

    def mean(self) -> float:
        return self.tokens / self.rounds

    def add(self, text: Text, newest: int, accepted: int) -> int:
        """One round after row `newest`; returns the newest row of the next one.

        The text's end cuts a round off, as the length limit of a request does.
        """
        left = len(text.ids) - 2 - newest
        emitted = min(accepted + 1, left)
        self.rounds += 1
        self.tokens += emitted
        return newest + emitted

    def walk(self, text: Text, right: Sequence[Tensor]) -> None:
        """All rounds of a text with a chain; `right` is its part of `right_guesses`, depth by depth."""
        newest = text.prompt_len - 1
        while newest < len(text.ids) - 2:
            newest = self.add(text, newest, _right_at(right, newest - text.prompt_len + 1))


def right_guesses(
    network: DraftNetwork, tokens_of: Tensor, texts: Sequence[Text], depth: int
) -> list[list[Tensor]]:
    """[depth][text] -> bool [rows]: does row r name the token that the text has, its prefix given?"""
    right = []
    for step, unrolled in enumerate(unroll(network, texts, depth)):
        guesses = tokens_of[network.logits(unrolled.stream).argmax(-1)].split(unrolled.lengths)
        places = predicted_positions(texts, unrolled, step)
        right.append([guess == text.ids[place] for guess, text, place in zip(guesses, texts, places)])
    return right


def _right_at(right: Sequence[Tensor], row: int) -> int:
    """How many of a row's guesses hold before the first wrong one."""
    for step, rows in enumerate(right):
        if row >= len(rows) or not rows[row]:
            return step
    return len(right)


def walk_trees(
    network: DraftNetwork, tokens_of: Tensor, texts: Sequence[Text], shape: TreeShape, rounds: Rounds
) -> None:
    """All rounds of the texts with a tree each, side by side."""
    prefixed = first_unroll(network, texts)
    streams = prefixed.first.stream.split(prefixed.first.lengths)
    prefix = _padded(prefixed.prefixes)
    newest = [text.prompt_len - 1 for text in texts]
    while True:
        going = [index for index, text in enumerate(texts) if newest[index] < len(text.ids) - 2]
        if not going:
            return
        rows = torch.tensor([newest[index] for index in going])
        stream = torch.stack([streams[index][newest[index] - texts[index].prompt_len + 1] for index in going])
        some = KeysValues(prefix.keys[going], prefix.values[going])
        tree = expand(network, tokens_of, stream, rows, some, shape)
        for place, index in enumerate(going):
            text = texts[index]
            following = text.ids[newest[index] + 2 :].tolist()
            newest[index] = rounds.add(text, newest[index], accepted_in_tree(tree, place, following))


def accepted_in_tree(tree: Tree, place: int, following: Sequence[int]) -> int:
    """How many nodes lie on the path from the root that spells what the target says."""
    tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
    node, accepted = -1, 0
    for wanted in following:
        children = [
            child for child in range(len(tokens)) if parents[child] == node and tokens[child] == wanted
        ]
        if not children:
            break
        node, accepted = children[0], accepted + 1
    return accepted


def _padded(prefixes: Sequence[KeysValues]) -> KeysValues:
    """The prefixes of all texts in one batch; nobody sees the padding."""
    longest = max(prefix.keys.shape[1] for prefix in prefixes)

    def together(parts: Sequence[Tensor]) -> Tensor:
        padded = parts[0].new_zeros(len(parts), longest, *parts[0].shape[2:])
        for line, part in zip(padded, parts):
            line[: part.shape[1]] = part[0]
        return padded

    return KeysValues(
        together([prefix.keys for prefix in prefixes]), together([prefix.values for prefix in prefixes])
    )

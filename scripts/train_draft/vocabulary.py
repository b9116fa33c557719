"""Owns the draft vocabulary: which tokens a draft can propose, and the two maps of the public format.

Read by the loss, the evaluation and the checkpoint. It must not know the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from train_draft.target import PlainTarget
from train_draft.texts import Text

# Rows of the whole vocabulary's logits that exist at once.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """`tokens` [draft_vocab] int64 are the target's ids, ascending: draft id j stands for `tokens[j]`."""

    tokens: Tensor
    target_size: int

    def offsets(self) -> Tensor:
        """`d2t` of the public format: target id = draft id + offset, int64 [draft_vocab]."""
        return self.tokens - torch.arange(len(self.tokens))

    def mask(self) -> Tensor:
        """`t2d` of the public format: which target ids have a draft id, bool [target_size]."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.tokens] = True
        return mask

    @classmethod
    def from_maps(cls, offsets: Tensor, mask: Tensor) -> DraftVocabulary:
        """The vocabulary that two stored maps describe.

        Raises ValueError where they contradict each other, as they do when offsets are read as ids.
        """
        vocabulary = cls(offsets + torch.arange(len(offsets)), len(mask))
        tokens = vocabulary.tokens
        inside = bool(((tokens >= 0) & (tokens < len(mask))).all())
        if not inside or not torch.equal(vocabulary.mask(), mask):
            raise ValueError(
                f"d2t ({len(offsets)} offsets) and t2d ({int(mask.sum())} marks) describe different draft "
                f"vocabularies; d2t holds target id - draft id, t2d marks the same target ids"
            )
        return vocabulary

    def draft_ids(self) -> Tensor:
        """Draft id of each target id [target_size], -1 where it has none."""
        ids = torch.full((self.target_size,), -1, dtype=torch.int64)
        ids[self.tokens] = torch.arange(len(self.tokens))
        return ids

    def coverage(self, texts: Sequence[Text]) -> float:
        """The share of the continuations' tokens that the draft could propose."""
        known = self.mask()
        hits = torch.cat([known[text.ids[text.prompt_len :]] for text in texts])
        return float(hits.float().mean())


@dataclass(frozen=True, slots=True)
class Opinions:
    """What the target itself would have said in some texts.

    `chances` [vocab] are its probabilities, summed over all positions of the continuations; `best` has for
    each text [num_new - 1] its best token at positions prompt_len .. n - 2, whatever was drawn there.
    """

    chances: Tensor
    best: list[Tensor]


@torch.inference_mode()
def read_opinions(target: PlainTarget, texts: Sequence[Text]) -> Opinions:
    """One pass of the head over what generation stored; the target itself is not run again."""
    chances = torch.zeros(target.config.vocab_size, dtype=torch.float64)
    lengths = [text.num_new - 1 for text in texts]
    final = torch.cat([text.final[text.prompt_len :] for text in texts])
    best = []
    for chunk in final.split(_CHUNK):
        logits = F.linear(chunk, target.head).float()
        best.append(logits.argmax(-1))
        chances += logits.softmax(-1).sum(0)
    return Opinions(chances, list(torch.cat(best).split(lengths)))


def choose_vocabulary(
    texts: Sequence[Text], chances: Tensor, *, size: int, forced: Iterable[int]
) -> DraftVocabulary:
    """The `size` tokens that training text holds most often; free places go to what the target nearly said.

    A small set of texts has fewer distinct tokens than a draft has places, and the target's summed
    probabilities fill them better than the lowest ids. `forced` (the tokens that end a text) are always in.
    """
    vocab_size = len(chances)
    if not 0 < size <= vocab_size:
        raise ValueError(
            f"--draft-vocab-size {size} is not between 1 and the target's {vocab_size}; choose a smaller one"
        )
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        counts += torch.bincount(text.ids[text.prompt_len :], minlength=vocab_size)
    rank = counts + chances / (chances.sum() + 1.0)
    rank[list(forced)] = float("inf")
    chosen = torch.sort(rank, descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values, vocab_size)

"""Owns the loss: soft cross-entropy to the target over the draft vocabulary, summed over the unrolls.

Read by the training loop. It must not step an optimiser or choose texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train_draft.network import DraftNetwork
from train_draft.texts import Text
from train_draft.unroll import unroll

UNROLL_DECAY = 0.8
# Rows whose logits over the draft vocabulary exist at once; they never enter autograd.
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text as training sees it.

    `best` [num_new - 1] has the target's best token at positions prompt_len .. n - 2, as a draft id; -1 where
    the draft vocabulary lacks it, and then the row teaches nothing.
    """

    text: Text
    best: Tensor


@dataclass(frozen=True, slots=True)
class StepLoss:
    """`total` carries the gradient; `accuracy` is the first unroll's agreement with the target."""

    total: Tensor
    accuracy: float
    rows: int


def teacher_chances(lessons: Sequence[Lesson], head: Tensor) -> Tensor:
    """The target's distribution over the draft vocabulary at positions prompt_len .. n - 2 of each text.

    `head` [draft_vocab, H] holds the target's own head rows. [positions of all texts, draft_vocab].
    """
    final = torch.cat([lesson.text.final[lesson.text.prompt_len :] for lesson in lessons]).to(head.dtype)
    with torch.no_grad():
        return F.linear(final, head).float().softmax(-1).to(head.dtype)


def draft_loss(
    network: DraftNetwork, lessons: Sequence[Lesson], teacher_head: Tensor, depth: int
) -> StepLoss:
    """Sum over the unrolls k of 0.8^k times the mean soft cross-entropy of the rows that teach something."""
    texts = [lesson.text for lesson in lessons]
    chances = teacher_chances(lessons, teacher_head)
    best = torch.cat([lesson.best for lesson in lessons])
    sizes = [len(lesson.best) for lesson in lessons]
    offsets = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
    total = torch.zeros(())
    accuracy, rows = 0.0, 0
    for step, unrolled in enumerate(unroll(network, texts, depth)):
        # Row r of a text asks the target at position prompt_len + r + step.
        asked = torch.cat(
            [
                torch.arange(offset + step, offset + step + length)
                for offset, length in zip(offsets, unrolled.lengths)
            ]
        )
        teaching = (best[asked] >= 0).nonzero()[:, 0]
        if not len(teaching):
            continue
        weight = UNROLL_DECAY**step / len(teaching)
        loss, hits = soft_cross_entropy(
            network.scored(unrolled.stream[teaching]),
            network.weights["lm_head.weight"],
            chances,
            asked[teaching],
            best[asked[teaching]],
            weight,
        )
        total = total + loss
        if step == 0:
            accuracy, rows = float(hits) / len(asked), len(asked)
    return StepLoss(total, accuracy, rows)


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, chances: Tensor, rows: Tensor, best: Tensor, weight: float
) -> tuple[Tensor, Tensor]:
    """Weight times the sum of -p log q, with q = softmax(hidden @ head^T), and how often q's best is `best`.

    `hidden` [n, H], `head` [V, H]; row i is held against `chances[rows[i]]`. The gradients are computed along
    with the loss, chunk by chunk, so the logits [n, V] never exist whole.
    """
    loss, hits = _SoftCrossEntropy.apply(hidden, head, chances, rows, best, weight)
    return loss, hits


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, chances: Tensor, rows: Tensor, best: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        loss, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape) if ctx.needs_input_grad[1] else None
        for first in range(0, len(hidden), _CHUNK):
            some = slice(first, first + _CHUNK)
            teacher = chances[rows[some]].float()
            logits = F.linear(hidden[some], head).float()
            highest, guess = logits.max(-1)
            hits += (guess == best[some]).sum()
            own = logits.softmax(-1)
            # The logarithm of the softmax's denominator, read off at the highest logit, where q is not tiny.
            scale = highest - own.gather(1, guess[:, None])[:, 0].log()
            loss += (scale * teacher.sum(-1)).sum() - torch.dot(teacher.flatten(), logits.flatten())
            grad = ((own - teacher) * weight).to(hidden.dtype)
            grad_hidden[some] = grad @ head
            if grad_head is not None:
                grad_head += grad.T @ hidden[some]
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(hits)
        return loss * weight, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_hits: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        head = None if grad_head is None else grad_head * grad_loss
        return grad_hidden * grad_loss, head, None, None, None, None

"""Owns probabilities of tokens as requests and drafts want them: the calls, and their torch references.

Read by the engine's operations of these names and by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AskedRows:
    """What is asked about rows of logits.

    `numbers` int64 [3, asked]: the row of the logits, where its tokens end in `ids`, and how many of its best
    tokens are listed. `divisors` float32 [asked]: the temperature of each. `ids` int64 [tokens].
    """

    numbers: torch.Tensor
    divisors: torch.Tensor
    ids: torch.Tensor


def top_logprobs(
    logits: torch.Tensor, asked: AskedRows, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logarithms of the probabilities at float32 logits [rows, vocab] / divisor.

    Of the tokens in `ids`: float32 [tokens]; of the best ones: float32 and int64 [asked, most], best first,
    the lower id first where two are equal, of which as many are written as a row asks for. A logarithm is
    (logit - highest) / divisor - log(sum), each step rounded to float32, so a token has one wherever it is
    listed. A row has a finite logit, and the others are finite or minus infinity.
    """
    own = torch.empty(asked.ids.shape[0], dtype=torch.float32)
    top = torch.empty(asked.divisors.shape[0], most, dtype=torch.float32)
    top_ids = torch.empty(asked.divisors.shape[0], most, dtype=torch.int64)
    torch.ops.sgl_kernel.top_logprobs(logits, asked.numbers, asked.divisors, asked.ids, own, top, top_ids)
    return own, top, top_ids


def top_logprobs_reference(
    logits: torch.Tensor, asked: AskedRows, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by a sort, from a sum in float64; all of the `most` best are written."""
    rows, ends, _ = asked.numbers
    scaled = logits[rows] - logits[rows].amax(dim=-1, keepdim=True)
    scaled /= asked.divisors[:, None]
    logprobs = scaled - scaled.double().logsumexp(dim=-1, keepdim=True).float()
    places = torch.arange(len(rows)).repeat_interleave(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)))
    ranked = logprobs.sort(dim=-1, descending=True, stable=True)
    return logprobs[places, asked.ids], ranked.values[:, :most], ranked.indices[:, :most]


def top_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` tokens of each row of float32 logits [rows, vocab]: int64 and float32 [rows, count].

    Ids, and their share of the softmax over the row; the best first, the lower id first where two are equal.
    A row that is not finite (minus infinity aside) gives the first ids, and 0 for each.
    """
    ids = torch.empty(logits.shape[0], count, dtype=torch.int64)
    probs = torch.empty(logits.shape[0], count, dtype=torch.float32)
    torch.ops.sgl_kernel.top_probs(logits, ids, probs)
    return ids, probs


def top_probs_reference(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a sort, in float64, of rows that are finite or masked."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return ids, logits.double().softmax(dim=-1).gather(1, ids).float()


@torch.library.register_fake("sgl_kernel::top_probs")
def _top_probs_fake(logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> None:
    """Only writes into `ids` and `probs`."""


@torch.library.register_fake("sgl_kernel::top_logprobs")
def _top_logprobs_fake(
    logits: torch.Tensor,
    asked: torch.Tensor,
    divisors: torch.Tensor,
    ids: torch.Tensor,
    own: torch.Tensor,
    top: torch.Tensor,
    top_ids: torch.Tensor,
) -> None:
    """Only writes into `own`, `top` and `top_ids`."""

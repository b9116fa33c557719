"""Owns the distribution that a token is drawn from as a dense row, and the draw from such rows.

Read by the reference draw and by acceptance rules that compare distributions. It must not know requests or
where random numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def id_bits(vocab: int) -> int:
    """Bits of the largest id: as many random numbers does a draw take."""
    return (vocab - 1).bit_length()


def kept_probs(
    logits: torch.Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> torch.Tensor:
    """The distribution that each row of logits [rows, vocab] is drawn from: [rows, vocab] float64, sum 1.

    Which tokens are kept is said at `draw_token.draw_reference`; the others have probability 0. A row with
    `top_k` 1 is greedy, whatever its temperature: 1 at its highest logit, the lowest id among equals.
    """
    weights = kept_weights(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = weights / weights.sum(dim=-1, keepdim=True)
    greedy = torch.tensor([k == 1 for k in top_k], device=logits.device)
    best = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], best, probs)


def kept_weights(
    logits: torch.Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> torch.Tensor:
    """As `kept_probs` of rows that are not greedy, but a kept token has its share of the whole vocabulary."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    vocab = logits.shape[1]
    probs = torch.softmax(logits.double() / column(temperature), dim=-1)
    ranked = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ranked.values.cumsum(dim=-1) - ranked.values
    keep = ranked.values >= column(min_p) * ranked.values[:, :1]
    # A sum may reach 1 by rounding before the last tokens: a top_p of 1 keeps those all the same.
    keep &= before < column([p if p < 1.0 else float("inf") for p in top_p])
    keep &= torch.arange(vocab, device=logits.device) < column([k if k > 0 else vocab for k in top_k])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, ranked.indices, ranked.values.where(keep, 0.0))


def draw_from(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw an id from each row of weights [rows, vocab], which need not sum to 1: [rows] int64.

    u [rows, id_bits(vocab)]: the number that decides about each bit of the id, in [0, 1). The bits are drawn
    as `draw_token.draw_reference` says. An id without weight is not drawn, unless its row has none at all.
    """
    vocab = weights.shape[1]
    cumulated = torch.nn.functional.pad(weights.cumsum(dim=-1), (1, 0))
    token = torch.zeros(weights.shape[0], 1, dtype=torch.int64, device=weights.device)
    for bit in reversed(range(id_bits(vocab))):
        middle = (token + (1 << bit)).clamp_(max=vocab)
        start, between = cumulated.gather(1, token), cumulated.gather(1, middle)
        end = cumulated.gather(1, (token + (2 << bit)).clamp_(max=vocab))
        left, right = between - start, end - between
        upper = (right > 0) & (u[:, bit : bit + 1] * (left + right) >= left)
        token = torch.where(upper, middle, token)
    return token[:, 0]

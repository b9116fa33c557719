"""Owns how log-probabilities leave the model: one token's value, the best alternatives, chosen ids.

Read by the logits processor (prompt) and the sampler (output). All values are finite and JSON-safe; it must
not change logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang.kernels.top_logprobs import AskedRow, top_logprobs
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.messages.io_struct import LOGPROB_FLOOR, TokenLogprob

__all__ = ["ScoredToken", "token_logprobs"]


class ScoredToken(NamedTuple):
    """A token, the row of logits that gave it, the temperature it is scored at, and what is asked there."""

    token_id: int
    row: int
    request: LogprobRequest
    temperature: float = 1.0


def token_logprobs(logits: torch.Tensor, tokens: Sequence[ScoredToken]) -> list[TokenLogprob]:
    """One entry a token out of logits [rows, vocab]: its value and what its request asks.

    A token's value and its entry among the alternatives are the same float.
    """
    found = top_logprobs(
        logits,
        [
            AskedRow(
                one.row, one.temperature, (one.token_id, *(one.request.token_ids or ())), one.request.top_num
            )
            for one in tokens
        ],
    )
    entries = []
    for token, (own, top, top_ids) in zip(tokens, found, strict=True):
        chosen = token.request.token_ids
        entries.append(
            TokenLogprob(
                logprob=_floored(own[0]),
                token_id=token.token_id,
                top=[(_floored(v), i) for v, i in zip(top, top_ids, strict=True)] if top else None,
                chosen=None
                if chosen is None
                else [(_floored(v), i) for v, i in zip(own[1:], chosen, strict=True)],
            )
        )
    return entries


def _floored(value: float) -> float:
    return max(value, LOGPROB_FLOOR)

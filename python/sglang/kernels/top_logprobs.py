"""Owns log-probabilities out of rows of logits: of given tokens, and the best ones with theirs.

Read by the layer that answers requests for them. It must not know requests: it takes tensors and numbers. The
compiled kernel reads the logits once; in torch it takes several passes over a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from sglang.kernels.compiled_for import kernels_for

__all__ = ["AskedRow", "RowLogprobs", "top_logprobs"]


class AskedRow(NamedTuple):
    """What is asked about one row of logits at a temperature: tokens, and how many of the best."""

    row: int
    temperature: float
    token_ids: Sequence[int]
    top_num: int


class RowLogprobs(NamedTuple):
    """The log-probabilities of the tokens that were asked, and of the best ones: values, then ids."""

    own: list[float]
    top: list[float]
    top_ids: list[int]


def top_logprobs(logits: torch.Tensor, asked: Sequence[AskedRow]) -> list[RowLogprobs]:
    """One entry a row asked of float32 logits [rows, vocab], which stay as they are.

    The best come first, the lower id first where two are equal; no more than the vocabulary has. A token has
    the same float wherever it is listed. A row has a finite logit, and the others are finite or minus
    infinity.
    """
    if not asked:
        return []
    vocab = logits.shape[1]
    counts = [min(one.top_num, vocab) for one in asked]
    kernels = kernels_for(logits) if logits.dtype == torch.float32 and logits.stride(-1) == 1 else None
    ends = list(accumulate(len(one.token_ids) for one in asked))
    ids = list(chain.from_iterable(one.token_ids for one in asked))
    if kernels is not None:
        rows = kernels.logprobs.AskedRows(
            torch.tensor([[one.row for one in asked], ends, counts], dtype=torch.int64),
            torch.tensor([one.temperature for one in asked], dtype=torch.float32),
            torch.tensor(ids, dtype=torch.int64),
        )
        own, top, top_ids = (
            part.tolist() for part in kernels.logprobs.top_logprobs(logits, rows, max(counts))
        )
    else:
        own, top, top_ids = _in_torch(logits, asked, counts)
    return [
        RowLogprobs(own[end - len(one.token_ids) : end], top[at][:count], top_ids[at][:count])
        for at, (one, end, count) in enumerate(zip(asked, ends, counts, strict=True))
    ]


def _in_torch(
    logits: torch.Tensor, asked: Sequence[AskedRow], counts: list[int]
) -> tuple[list[float], list[list[float]], list[list[int]]]:
    device = logits.device
    scaled = logits[[one.row for one in asked]]
    scaled -= scaled.amax(dim=-1, keepdim=True)  # else a small temperature lifts the best one to infinity
    scaled /= torch.tensor([one.temperature for one in asked], dtype=logits.dtype, device=device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    places = [at for at, one in enumerate(asked) for _ in one.token_ids]
    ids = list(chain.from_iterable(one.token_ids for one in asked))
    own = logprobs[torch.tensor(places, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)].tolist()
    most = max(counts)
    best = torch.topk(logprobs, most, dim=-1)
    top, top_ids = best.values.tolist(), best.indices.tolist()
    for at, count in enumerate(counts):
        if count:
            top[at], top_ids[at] = _lowest_of_equals(logprobs[at], top[at][:count], top_ids[at][:count])
    return own, top, top_ids


def _lowest_of_equals(
    logprobs: torch.Tensor, values: list[float], ids: list[int]
) -> tuple[list[float], list[int]]:
    """The best tokens with the lower id first among equals; topk takes any that share the last value."""
    last = values[-1]
    ranked = sorted((-value, i) for value, i in zip(values, ids, strict=True) if value > last)
    level = (logprobs == last).nonzero()[:, 0][: len(values) - len(ranked)].tolist()
    return values, [i for _, i in ranked] + level

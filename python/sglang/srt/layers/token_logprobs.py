"""Owns how log-probabilities leave the model: one token's value, the best alternatives, chosen ids.

Read by the logits processor (prompt) and the sampler (output). All values are finite and JSON-safe; it must
not change logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.messages.io_struct import LOGPROB_FLOOR, TokenLogprob


def token_logprobs(
    logprobs: torch.Tensor, token_ids: Sequence[int], requests: Sequence[LogprobRequest]
) -> list[TokenLogprob]:
    """One entry a row of logprobs [rows, vocab]: the value of `token_ids[row]` and what `requests[row]` asks.

    A token's value and its entry among the alternatives are the same float.
    """
    rows = torch.arange(len(token_ids), device=logprobs.device)
    own = logprobs[rows, torch.tensor(token_ids, device=logprobs.device)].tolist()
    top = _top(logprobs, [request.top_num for request in requests])
    entries = []
    for row, (value, token_id, request) in enumerate(zip(own, token_ids, requests, strict=True)):
        chosen = None
        if request.token_ids is not None:
            values = logprobs[row, torch.tensor(request.token_ids, dtype=torch.int64)].tolist()
            chosen = [(_floored(v), i) for v, i in zip(values, request.token_ids, strict=True)]
        entries.append(TokenLogprob(logprob=_floored(value), token_id=token_id, top=top[row], chosen=chosen))
    return entries


def _floored(value: float) -> float:
    return max(value, LOGPROB_FLOOR)


def _top(logprobs: torch.Tensor, counts: list[int]) -> list[list[tuple[float, int]] | None]:
    """The `counts[row]` best tokens, best first, the lower id first where two are equal; None for none."""
    most = min(max(counts, default=0), logprobs.shape[1])
    if most == 0:
        return [None] * len(counts)
    best = torch.topk(logprobs, most, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    result: list[list[tuple[float, int]] | None] = []
    for row, count in enumerate(counts):
        if count == 0:
            result.append(None)
            continue
        count = min(count, most)
        last = values[row][count - 1]
        # topk takes any of the tokens that share the last value; we list the lowest ids.
        ranked = [(v, i) for v, i in zip(values[row], ids[row], strict=True) if v > last]
        level = (logprobs[row] == last).nonzero()[:, 0][: count - len(ranked)].tolist()
        ranked.sort(key=lambda entry: (-entry[0], entry[1]))
        result.append([(_floored(v), i) for v, i in ranked + [(last, i) for i in level]])
    return result

"""Owns what changes logits before a draw: penalties for repeated tokens, logit bias, suppressed end tokens.

Read by the sampler. Everything is derived from the rows' own output ids, so no batch change can disturb it;
it must not keep state between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.batch.sampling_state import SamplingState

#: Where a penalised logit ends: beyond any real one, and still a number after a division by a temperature.
_FARTHEST = 1e30


def adjust_logits(logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
    """Change logits [rows, vocab] in place, in this order: repetition, frequency and presence penalty, bias,
    end tokens that are not allowed yet.
    """
    _penalise(logits, rows)
    _add_bias(logits, rows)
    _suppress_end(logits, rows)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
    """For a token that occurs `count` times in the output: divide a positive logit by the repetition penalty
    (multiply a negative one), then subtract count * frequency + presence.
    """
    at: list[int] = []
    ids: list[int] = []
    repetition: list[float] = []
    minus: list[float] = []
    for b, row in enumerate(rows):
        p = row.params
        if not row.counts or (
            p.repetition_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0
        ):
            continue
        at += [b] * len(row.counts)
        ids += row.counts
        repetition += [p.repetition_penalty] * len(row.counts)
        minus += [count * p.frequency_penalty + p.presence_penalty for count in row.counts.values()]
    if not at:
        return
    index = (torch.tensor(at, device=logits.device), torch.tensor(ids, device=logits.device))
    values = logits[index]
    factor = torch.tensor(repetition, dtype=logits.dtype, device=logits.device)
    # A repetition penalty near 0 would divide to infinity; it means "always this one", which a number says.
    values = torch.where(values > 0, values / factor, values * factor).clamp_(-_FARTHEST, _FARTHEST)
    logits[index] = values - torch.tensor(minus, dtype=logits.dtype, device=logits.device)


def _add_bias(logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
    for b, row in enumerate(rows):
        bias = row.params.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=logits.device)
            logits[b, ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)


def _suppress_end(logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
    for b, row in enumerate(rows):
        if row.suppresses_end and row.end_ids:
            logits[b, torch.tensor(sorted(row.end_ids), device=logits.device)] = float("-inf")

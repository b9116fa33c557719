"""Owns what changes logits before a draw: penalties for repeated tokens, logit bias, suppressed end tokens.

Read by the sampler. Everything is derived from each request's own output ids, so no batch change can disturb
it; nothing is kept between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.batch.sampling_state import SamplingState

#: The largest penalised logit: beyond any real one, and still finite after a division by a temperature.
_LARGEST = 1e30


def adjust_logits(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Change logits [rows, vocab] in place: penalties, then bias, then end tokens not allowed yet."""
    _penalise(logits, states)
    _add_bias(logits, states)
    _suppress_end(logits, states)


def _penalise(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Lower the logits of tokens that were produced before.

    For a token that occurs `count` times in the output: divide a positive logit by the repetition penalty
    (multiply a negative one), then subtract count * frequency + presence.
    """
    at: list[int] = []
    ids: list[int] = []
    repetition: list[float] = []
    minus: list[float] = []
    for b, state in enumerate(states):
        p = state.params
        if not state.counts or not p.has_penalties:
            continue
        at += [b] * len(state.counts)
        ids += state.counts
        repetition += [p.repetition_penalty] * len(state.counts)
        minus += [count * p.frequency_penalty + p.presence_penalty for count in state.counts.values()]
    if not at:
        return
    index = (torch.tensor(at, device=logits.device), torch.tensor(ids, device=logits.device))
    values = logits[index]
    factor = torch.tensor(repetition, dtype=logits.dtype, device=logits.device)
    # A repetition penalty near 0 would divide to infinity; a large finite logit wins just as surely.
    values = torch.where(values > 0, values / factor, values * factor).clamp_(-_LARGEST, _LARGEST)
    logits[index] = values - torch.tensor(minus, dtype=logits.dtype, device=logits.device)


def _add_bias(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    for b, state in enumerate(states):
        bias = state.params.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=logits.device)
            logits[b, ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)


def _suppress_end(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    for b, state in enumerate(states):
        if state.suppresses_end and state.end_ids:
            logits[b, torch.tensor(sorted(state.end_ids), device=logits.device)] = float("-inf")

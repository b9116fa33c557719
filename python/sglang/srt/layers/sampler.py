"""Owns the step from logits to tokens: adjustment, greedy choice or draw, log-probabilities, failed rows.

Read by the tensor-parallel worker and by the acceptance rules of drafts. A row's result depends on its own
logits, parameters, output ids and seed and on nothing else, whatever steps came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.kernels.sample_tokens import (
    NOT_FINITE,
    NOTHING_TO_DRAW,
    RowDraw,
    RowDraws,
    best_tokens,
    sample_rows,
)
from sglang.srt.batch.forward_batch import DrawnTokens
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.penalties import adjust_logits
from sglang.srt.layers.token_logprobs import ScoredToken, token_logprobs
from sglang.srt.messages.io_struct import TokenLogprob

#: Takes tokens away from rows of logits [rows, vocab] in place (minus infinity), after penalties and bias.
RowMask = Callable[[torch.Tensor], None]


class Sampler:
    """Draws one token for each row of logits.

    How rows are drawn is kept in the form that the draw takes, for as long as the rows are those of the same
    sequences.
    """

    def __init__(self) -> None:
        self._states: list[SamplingState] = []
        self._draws = RowDraws([])

    def __call__(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        logprob_requests: Sequence[LogprobRequest | None] | None = None,
        mask: RowMask | None = None,
        places: Sequence[int] | None = None,
    ) -> DrawnTokens:
        """logits [rows, vocab], float32; with `places` the rows are these ones, in the order of `states`.

        They stay as they are where nothing changes them (no penalty, bias, suppressed end or mask) and no
        log-probability is asked for, or where there are places; else they are overwritten. Where all rows are
        greedy and nothing changes them, nothing here waits for the device.
        """
        wants_logprobs = logprob_requests is not None and any(logprob_requests)
        if mask is None and not wants_logprobs and not any(state.changes_logits for state in states):
            return DrawnTokens(self._sample(logits, states, places), [None] * len(states))
        if places is not None:
            logits = logits[torch.tensor(places, dtype=torch.int64, device=logits.device)]
        failures = prepare_rows(logits, states, mask)
        ids = self._sample(logits, states, is_masked=True)[0]
        logprobs = row_logprobs(logits, states, ids, failures, logprob_requests or [None] * len(states))
        return DrawnTokens(torch.stack((ids, failures)), logprobs)

    def _sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        places: Sequence[int] | None = None,
        *,
        is_masked: bool = False,
    ) -> torch.Tensor:
        if states != self._states:
            self._states = list(states)
            self._draws = RowDraws([_draw_of(state) for state in states])
        positions = [state.num_output for state in states]
        return sample_rows(logits, self._draws, positions, places=places, is_masked=is_masked)


def _draw_of(state: SamplingState) -> RowDraw:
    p = state.params
    if p.is_greedy:
        return RowDraw(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=state.seed)
    return RowDraw(p.temperature, p.top_k, p.top_p, p.min_p, state.seed)


def prepare_rows(
    logits: torch.Tensor, states: Sequence[SamplingState], mask: RowMask | None = None
) -> torch.Tensor:
    """Change logits [rows, vocab] in place into those that tokens are drawn from; what failed, [rows].

    The result holds indices into `ROW_FAILURES`. The logits of a failed row are made harmless.
    """
    failures = torch.where(best_tokens(logits)[1], 0, NOT_FINITE)
    _blank(logits, failures)
    if mask is None and not any(state.changes_logits for state in states):
        return failures
    adjust_logits(logits, states)
    if mask is not None:
        mask(logits)
    left = torch.isfinite(logits.amax(dim=-1))
    failures = failures.where(left | (failures != 0), NOTHING_TO_DRAW)
    _blank(logits, failures)
    return failures


def _blank(logits: torch.Tensor, failures: torch.Tensor) -> None:
    """Make the logits of failed rows harmless."""
    failed = failures != 0
    if bool(failed.any()):
        logits[failed] = 0.0


def row_logprobs(
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    token_ids: torch.Tensor,
    failures: torch.Tensor,
    requests: Sequence[LogprobRequest | None],
) -> list[TokenLogprob | None]:
    """What each row of prepared logits asks about its token, at the row's temperature (1 if greedy).

    A failed row and one that asks nothing give None.
    """
    entries: list[TokenLogprob | None] = [None] * len(states)
    if not any(requests):
        return entries
    failed = failures.tolist()
    asking = [(b, request) for b, request in enumerate(requests) if request is not None and not failed[b]]
    if not asking:
        return entries
    ids = token_ids.tolist()
    tokens = [
        ScoredToken(ids[b], b, request, 1.0 if (p := states[b].params).is_greedy else p.temperature)
        for b, request in asking
    ]
    for token, entry in zip(tokens, token_logprobs(logits, tokens), strict=True):
        entries[token.row] = entry
    return entries

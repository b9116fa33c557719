"""Owns the step from logits to tokens: adjustment, greedy choice or draw, log-probabilities, failed rows.

Read by the tensor-parallel worker and by the acceptance rules of drafts. A row's result depends on its own
logits, parameters, output ids and seed and on nothing else; it must not keep state between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.kernels.sample_tokens import best_tokens, draw_tokens
from sglang.srt.batch.forward_batch import ROW_FAILURES, DrawnTokens
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.penalties import adjust_logits
from sglang.srt.layers.token_logprobs import token_logprobs
from sglang.srt.messages.io_struct import TokenLogprob

_FINE, _NOT_FINITE, _NOTHING_LEFT = range(len(ROW_FAILURES))

#: Takes tokens away from rows of logits [rows, vocab] in place (minus infinity), after penalties and bias.
RowMask = Callable[[torch.Tensor], None]


class Sampler:
    """Draws one token for each row of logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        logprob_requests: Sequence[LogprobRequest | None] | None = None,
        mask: RowMask | None = None,
    ) -> DrawnTokens:
        """logits [rows, vocab], float32; they are overwritten.

        Where every row is plain greedy and none is masked or asks for log-probabilities, nothing here waits
        for the device, and the logits stay as they are.
        """
        requests = logprob_requests or [None] * len(states)
        if mask is None and not any(requests) and all(state.is_plain_greedy for state in states):
            ids, finite = best_tokens(logits)
            return DrawnTokens(ids, _failures(finite), [None] * len(states))
        failures = prepare_rows(logits, states, mask)
        token_ids = self._choose(logits, states)
        return DrawnTokens(token_ids, failures, row_logprobs(logits, states, token_ids, failures, requests))

    @staticmethod
    def _choose(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        drawn = [b for b, state in enumerate(states) if not state.params.is_greedy]
        if not drawn:
            return best_tokens(logits)[0]
        params = [states[b].params for b in drawn]
        everywhere = len(drawn) == len(states)
        picked = draw_tokens(
            logits if everywhere else logits[drawn],
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seeds=[states[b].seed for b in drawn],
            positions=[states[b].num_output for b in drawn],
        )
        if everywhere:
            return picked
        ids = best_tokens(logits)[0]
        ids[drawn] = picked
        return ids


def prepare_rows(
    logits: torch.Tensor, states: Sequence[SamplingState], mask: RowMask | None = None
) -> torch.Tensor:
    """Change logits [rows, vocab] in place into those that tokens are drawn from; what failed, [rows].

    The result holds indices into `ROW_FAILURES`. The logits of a failed row are made harmless.
    """
    failures = _failures(best_tokens(logits)[1])
    _blank(logits, failures)
    if mask is None and all(state.is_plain_greedy for state in states):
        return failures
    adjust_logits(logits, states)
    if mask is not None:
        mask(logits)
    left = torch.isfinite(logits.amax(dim=-1))
    failures = failures.where(left | (failures != _FINE), _NOTHING_LEFT)
    _blank(logits, failures)
    return failures


def _failures(finite: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, _FINE, _NOT_FINITE)


def _blank(logits: torch.Tensor, failures: torch.Tensor) -> None:
    """Make the logits of failed rows harmless."""
    failed = failures != _FINE
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
    rows = [b for b, _ in asking]
    divisors = [1.0 if (p := states[b].params).is_greedy else p.temperature for b in rows]
    scaled = logits[rows]
    scaled -= scaled.amax(dim=-1, keepdim=True)  # else a small temperature lifts the best one to infinity
    scaled /= torch.tensor(divisors, dtype=logits.dtype, device=logits.device)[:, None]
    found = token_logprobs(
        torch.log_softmax(scaled, dim=-1), token_ids[rows].tolist(), [request for _, request in asking]
    )
    for b, entry in zip(rows, found, strict=True):
        entries[b] = entry
    return entries

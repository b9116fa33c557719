"""Owns the step from logits to tokens: adjustment, greedy choice or draw, log-probabilities, failed rows.

Read by the tensor-parallel worker. A row's result depends on its own logits, parameters, output ids and seed
and on nothing else; it must not keep state between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.kernels.draw_token import draw, uniforms
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.penalties import adjust_logits
from sglang.srt.layers.token_logprobs import token_logprobs
from sglang.srt.messages.io_struct import TokenLogprob

NOT_FINITE = (
    "the model gave logits that are not finite for this request (NaN or infinity); the request is ended and "
    "others are not affected. Try --dtype float32 if this repeats"
)
NOTHING_LEFT = (
    "min_new_tokens keeps back every token this vocabulary has; use fewer stop_token_ids or no min_new_tokens"
)


@dataclass(slots=True)
class SamplerOutput:
    """One entry a row; a failed row has a sentence and no token."""

    token_ids: list[int | None]
    failures: list[str | None]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Draws one token for each row of logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingState],
        asks: Sequence[LogprobRequest | None] | None = None,
    ) -> SamplerOutput:
        """logits [rows, vocab], float32; they are overwritten."""
        failures = self._fail_where(~torch.isfinite(logits.sum(dim=-1)), logits, NOT_FINITE)
        asked = [] if asks is None else [b for b, ask in enumerate(asks) if ask is not None]
        plain = all(row.is_plain_greedy for row in rows)
        if not plain:
            adjust_logits(logits, rows)
            broken = self._fail_where(~torch.isfinite(logits.amax(dim=-1)), logits, NOTHING_LEFT)
            failures = [first or second for first, second in zip(failures, broken, strict=True)]
        token_ids = self._choose(logits, rows)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        asked = [b for b in asked if failures[b] is None]
        if asked:
            assert asks is not None
            entries = token_logprobs(
                self._log_softmax(logits, rows, asked),
                [token_ids[b] for b in asked],
                [ask for b in asked if (ask := asks[b]) is not None],
            )
            for b, entry in zip(asked, entries, strict=True):
                logprobs[b] = entry
        ids = [None if failure else token for token, failure in zip(token_ids, failures, strict=True)]
        return SamplerOutput(ids, failures, logprobs)

    @staticmethod
    def _fail_where(bad: torch.Tensor, logits: torch.Tensor, sentence: str) -> list[str | None]:
        """Sentences for the bad rows, whose logits are made harmless."""
        flags = bad.tolist()
        if not any(flags):
            return [None] * len(flags)
        logits[bad] = 0.0
        return [sentence if flag else None for flag in flags]

    @staticmethod
    def _choose(logits: torch.Tensor, rows: Sequence[SamplingState]) -> list[int]:
        drawn = [b for b, row in enumerate(rows) if not row.params.is_greedy]
        if len(drawn) < len(rows):
            ids = logits.argmax(dim=-1).tolist()  # the lowest id where several are best
        else:
            ids = [0] * len(rows)
        if drawn:
            params = [rows[b].params for b in drawn]
            picked = draw(
                logits if len(drawn) == len(rows) else logits[drawn],
                temperature=[p.temperature for p in params],
                top_k=[p.top_k for p in params],
                top_p=[p.top_p for p in params],
                min_p=[p.min_p for p in params],
                u=[uniforms(rows[b].seed, rows[b].num_output) for b in drawn],
            )
            for b, token in zip(drawn, picked, strict=True):
                ids[b] = token
        return ids

    @staticmethod
    def _log_softmax(logits: torch.Tensor, rows: Sequence[SamplingState], asked: list[int]) -> torch.Tensor:
        """After penalties and bias, at the row's temperature (1 for greedy rows)."""
        heat = [1.0 if (p := rows[b].params).is_greedy else p.temperature for b in asked]
        scaled = logits[asked]
        scaled -= scaled.amax(dim=-1, keepdim=True)  # else a small temperature lifts the best one to infinity
        scaled /= torch.tensor(heat, dtype=logits.dtype, device=logits.device)[:, None]
        return torch.log_softmax(scaled, dim=-1)

"""Owns what a draft has not read yet: the tokens of rounds without guesses, which it takes in together later.

Held by the drafters with a model. A forward of a draft over one row costs nearly what one over many does, and
where rounds go on without guesses nobody waits for it. It must not run the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import VerifiedRound

__all__ = ["MOST_DEFERRED", "DeferredRows"]

#: Tokens of a request that are put off at most: their hidden rows are kept until then.
MOST_DEFERRED = 24


@dataclass(slots=True)
class _Row:
    """What one request has put off, from position `first` on; its hidden rows as (round's rows, index)."""

    first: int
    token_ids: list[int] = field(default_factory=list)
    hidden: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class DeferredRows:
    """The rows that requests have put off, by their row of the request table."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    @property
    def is_due(self) -> bool:
        """Whether a request has put off as much as it may."""
        return any(len(row.token_ids) >= MOST_DEFERRED for row in self._rows.values())

    def put_off(self, verified: VerifiedRound, token_ids: Sequence[int]) -> None:
        """A round of one node a request, whose rows the draft would read with `token_ids` [batch]."""
        round, hidden = verified.round, verified.hidden
        rows = round.req_pool_indices.tolist()
        for b, (row, length) in enumerate(zip(rows, round.lengths_list, strict=True)):
            entry = self._rows.get(row)
            if entry is None or entry.first + len(entry.token_ids) != length:
                entry = self._rows[row] = _Row(length)
            entry.token_ids.append(token_ids[b])
            if hidden is not None:
                entry.hidden.append((hidden, b))

    def forget(self, req_pool_indices: torch.Tensor) -> None:
        """These rows of the table have got a prompt: what was put off belongs to nobody."""
        for row in req_pool_indices.tolist() if self._rows else ():
            self._rows.pop(row, None)

    def take(self, round: Round, *, accepted: int = 0) -> tuple[ForwardBatch, torch.Tensor | None] | None:
        """All that the requests of this round have put off, as one EXTEND batch with its hidden rows.

        `accepted`: tokens that each of them has got in this round. None where there is nothing. What others
        have put off is forgotten: they have ended, or begin anew with their prompt.
        """
        rows, self._rows = self._rows, {}
        found: list[tuple[int, int, _Row]] = []  # place in the round, row of the table, what it has put off
        for b, row in enumerate(round.req_pool_indices.tolist() if rows else ()):
            entry = rows.get(row)
            end = round.lengths_list[b] + accepted
            if entry is not None and entry.first + len(entry.token_ids) == end:
                found.append((b, row, entry))
        if not found:
            return None
        device = round.lengths.device
        lengths = [len(entry.token_ids) for _, _, entry in found]
        ends = [entry.first + count for (_, _, entry), count in zip(found, lengths, strict=True)]
        tables = torch.tensor([row for _, row, _ in found], device=device)
        positions = torch.tensor(
            [entry.first + place for _, _, entry in found for place in range(len(entry.token_ids))],
            device=device,
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.tensor([id for _, _, entry in found for id in entry.token_ids], device=device),
            positions=positions,
            out_cache_loc=round.req_to_token[
                tables.repeat_interleave(torch.tensor(lengths, device=device)), positions
            ],
            req_pool_indices=tables,
            seq_lens=torch.tensor(ends, device=device),
            seq_lens_list=ends,
            extend_lens=lengths,
            sampling_states=[None] * len(found),
        )
        hidden = [rows[index] for _, _, entry in found for rows, index in entry.hidden]
        return batch, torch.stack(hidden) if hidden else None

"""Owns which rows of the last hidden states become logits: the ones drawn from, and prompt rows that were
asked.

Read by models (their last step). It must not hold the logits of a whole prompt at once: prompt rows pass in
pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, LogprobAsk
from sglang.srt.layers.sampler import NOT_FINITE
from sglang.srt.layers.token_logprobs import token_logprobs
from sglang.srt.messages.io_struct import TokenLogprob

#: Bytes that the float32 logits of one piece of a prompt may take.
PIECE_BYTES = 64 << 20

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class LogitsProcessorOutput:
    """`logits` [drawing requests, vocab] in the order of the batch; `drawing` lists those requests.

    `input_logprobs` and `failures` have one entry a request.
    """

    logits: torch.Tensor
    drawing: list[int]
    input_logprobs: list[list[TokenLogprob] | None] | None
    failures: list[str | None]


class LogitsProcessor:
    """Applies a head to the rows that matter. `piece_bytes` bounds one piece of prompt logits."""

    def __init__(self, vocab_size: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.vocab_size = vocab_size
        self.rows_at_once = max(1, piece_bytes // (4 * vocab_size))

    def __call__(self, hidden: torch.Tensor, head: Head, batch: ForwardBatch) -> LogitsProcessorOutput:
        """hidden [num_tokens, hidden size], after the last norm."""
        drawing = [b for b, row in enumerate(batch.sampling_rows) if row is not None]
        failures: list[str | None] = [None] * batch.batch_size
        input_logprobs = None
        if batch.logprob_asks is not None:
            input_logprobs = self._prompt(hidden, head, batch, failures)
        if len(drawing) < batch.batch_size or batch.num_tokens > batch.batch_size:
            rows = torch.tensor(_last_rows(batch, drawing), dtype=torch.int64, device=hidden.device)
            hidden = hidden[rows]
        logits = head(hidden) if drawing else hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return LogitsProcessorOutput(logits, drawing, input_logprobs, failures)

    def _prompt(
        self, hidden: torch.Tensor, head: Head, batch: ForwardBatch, failures: list[str | None]
    ) -> list[list[TokenLogprob] | None]:
        assert batch.logprob_asks is not None
        result: list[list[TokenLogprob] | None] = []
        first = 0
        for b, (ask, count) in enumerate(zip(batch.logprob_asks, batch.extend_lens, strict=True)):
            entries = None
            if ask is not None and ask.targets:
                if ask.first_row + len(ask.targets) > count:
                    raise RuntimeError(
                        f"request {b} asks for {len(ask.targets)} prompt tokens from row {ask.first_row} on, "
                        f"and has {count} rows in this forward"
                    )
                entries = self._request(hidden, head, first + ask.first_row, ask)
                if entries is None:
                    failures[b] = NOT_FINITE
            result.append(entries)
            first += count
        return result

    def _request(
        self, hidden: torch.Tensor, head: Head, first: int, ask: LogprobAsk
    ) -> list[TokenLogprob] | None:
        """The entries of one request's targets; None when a row is not finite."""
        entries: list[TokenLogprob] = []
        for start in range(0, len(ask.targets), self.rows_at_once):
            targets = ask.targets[start : start + self.rows_at_once]
            logits = head(hidden[first + start : first + start + len(targets)])
            if not bool(torch.isfinite(logits.sum())):
                return None
            logprobs = torch.log_softmax(logits, dim=-1)
            entries += token_logprobs(logprobs, targets, [ask] * len(targets))
        return entries


def _last_rows(batch: ForwardBatch, drawing: list[int]) -> list[int]:
    """The last row of each drawing request."""
    ends: list[int] = []
    end = 0
    for count in batch.extend_lens:
        end += count
        ends.append(end - 1)
    return [ends[b] for b in drawing]

"""Owns which rows of the last hidden states become logits, and how often the head is called for them.

Rows are drawn from, or were asked for with a prompt's log-probabilities. Read by models (their last step). It
must not hold the logits of a whole prompt at once: prompt rows pass in pieces of bounded size. Where the head
spans attention-DP replicas, all of them call it equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from sglang.srt.batch.forward_batch import NOT_FINITE, ForwardBatch
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.layers.communicator import head_spans_replicas
from sglang.srt.layers.exchange.dp_gather import gather_rows
from sglang.srt.layers.token_logprobs import ScoredToken, token_logprobs
from sglang.srt.messages.io_struct import TokenLogprob
from sglang.srt.runtime_context import get_parallel

#: Bytes that the float32 logits of one piece of a prompt may take; over several replicas, of all their rows.
PIECE_BYTES = 64 << 20

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class LogitsProcessorOutput:
    """`logits` [drawing requests, vocab] in the order of the batch; `drawing` lists those requests.

    In a speculative round `logits` has the rows that the batch names, and `drawing` is empty.
    `input_logprobs` and `failures` have one entry a request; only a rank that draws knows those of prompts.
    `hidden` [num_tokens, features] is there where the batch captures hidden rows.
    """

    logits: torch.Tensor
    drawing: list[int]
    input_logprobs: list[list[TokenLogprob] | None] | None
    failures: list[str | None]
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of the head: this replica's rows `start : end` of those to score.

    `counts` are the rows that each replica brings; None where the head takes those of this replica alone.
    """

    start: int
    end: int
    counts: list[int] | None = None


@dataclass(slots=True)
class _PromptRows:
    """The prompt targets of one request: row `start` of those to score and the ones after it, one a target.

    A row that is not finite fails its request.
    """

    request: int
    wanted: LogprobRequest
    start: int
    entries: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False

    def take(self, logits: torch.Tensor, piece: Piece) -> None:
        """Read the rows of this request out of the logits of a piece."""
        first = max(self.start, piece.start)
        last = min(self.start + len(self.wanted.targets), piece.end)
        if self.failed or first >= last:
            return
        own = logits[first - piece.start : last - piece.start]
        if not bool(torch.isfinite(own.sum())):
            self.failed = True
            return
        targets = self.wanted.targets[first - self.start : last - self.start]
        self.entries += token_logprobs(
            own, [ScoredToken(target, row, self.wanted) for row, target in enumerate(targets)]
        )


class LogitsProcessor:
    """Applies a head to the rows that matter. `piece_bytes` bounds one piece of prompt logits."""

    def __init__(self, vocab_size: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.vocab_size = vocab_size
        self.rows_at_once = max(1, piece_bytes // (4 * vocab_size))

    def __call__(self, hidden: torch.Tensor, head: Head, batch: ForwardBatch) -> LogitsProcessorOutput:
        """hidden [num_tokens, hidden size], after the last norm.

        Drawing rows are scored before prompt rows. A rank that does not draw calls the head as often and
        reads nothing.
        """
        if batch.spec is not None:
            return self._score_round(hidden, head, batch, batch.spec)
        drawing = [b for b, state in enumerate(batch.sampling_states) if state is not None]
        rows = _last_rows(batch, drawing)
        prompts = _add_prompt_rows(batch, rows)
        if not get_parallel().is_attn_tp_leader:
            prompts = []
        failures = _failures_of_parts(hidden, batch)
        if rows != list(range(batch.num_tokens)):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        drawn = hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        for piece in self._pieces(batch, len(drawing)):
            logits = _score(hidden[piece.start : piece.end], head, piece)
            drawn = _add_drawn(drawn, logits, piece, len(drawing))
            for prompt in prompts:
                prompt.take(logits, piece)
        return _output(batch, drawn, drawing, prompts, failures)

    def _score_round(
        self, hidden: torch.Tensor, head: Head, batch: ForwardBatch, spec: SpecInput
    ) -> LogitsProcessorOutput:
        """Logits of the rows that a round names; whoever draws from them finds those that are not finite."""
        if spec.logit_rows is not None:
            hidden = hidden.index_select(0, spec.logit_rows)
        num_rows = hidden.shape[0]
        logits = hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        for piece in self._pieces(batch, num_rows):
            logits = _add_drawn(logits, _score(hidden[piece.start : piece.end], head, piece), piece, num_rows)
        return LogitsProcessorOutput(logits, [], None, [None] * batch.batch_size)

    def _pieces(self, batch: ForwardBatch, num_drawing: int) -> Iterator[Piece]:
        """The calls of the head.

        One replica: the drawing rows together (their logits are the result), then the prompt rows in bounded
        pieces. Several that share a head: all rows in bounded pieces, as many as the replica with the most
        rows needs.
        """
        if head_spans_replicas():
            assert batch.dp_step is not None  # prepare_dp_forward has seen it
            yield from shared_pieces(
                batch.dp_step.num_logit_rows, get_parallel().attn_dp_rank, self.rows_at_once
            )
            return
        if num_drawing:
            yield Piece(0, num_drawing)
        total = batch.num_logit_rows
        for start in range(num_drawing, total, self.rows_at_once):
            yield Piece(start, min(start + self.rows_at_once, total))


def shared_pieces(num_rows: list[int], replica: int, rows_at_once: int) -> Iterator[Piece]:
    """The head calls of replicas that have `num_rows` rows each.

    One call takes at most `rows_at_once` rows of all of them together, and at least one of each.
    Rows [5, 0, 2] and 6 at once: pieces of two, so 2+0+2, 2+0+0, 1+0+0.
    """
    each = max(1, rows_at_once // len(num_rows))
    for first in range(0, max(num_rows), each):
        counts = [min(max(rows - first, 0), each) for rows in num_rows]
        start = min(first, num_rows[replica])
        yield Piece(start, start + counts[replica], counts)


def _score(rows: torch.Tensor, head: Head, piece: Piece) -> torch.Tensor:
    """Logits of this replica's rows of the piece."""
    if piece.counts is None:
        return head(rows)
    first = sum(piece.counts[: get_parallel().attn_dp_rank])
    return head(gather_rows(rows, piece.counts))[first : first + rows.shape[0]]


def _add_drawn(drawn: torch.Tensor, logits: torch.Tensor, piece: Piece, num_drawing: int) -> torch.Tensor:
    """The logits to draw from, with those of one more piece; a piece that brings none is not kept."""
    fresh = min(num_drawing, piece.end) - piece.start
    if fresh <= 0:
        return drawn
    return torch.cat((drawn, logits[:fresh])) if drawn.shape[0] else logits[:fresh]


def _add_prompt_rows(batch: ForwardBatch, rows: list[int]) -> list[_PromptRows]:
    """Append the rows of all prompt targets to `rows`."""
    prompts: list[_PromptRows] = []
    if batch.logprob_requests is None:
        return prompts
    first = 0
    for b, (wanted, count) in enumerate(zip(batch.logprob_requests, batch.extend_lens, strict=True)):
        if wanted is not None and wanted.targets:
            start, num_targets = wanted.first_row, len(wanted.targets)
            if start + num_targets > count:
                raise RuntimeError(
                    f"request {b} asks for {num_targets} prompt tokens from row {start} on, "
                    f"and has {count} rows in this forward"
                )
            prompts.append(_PromptRows(b, wanted, len(rows)))
            rows += range(first + start, first + start + num_targets)
        first += count
    return prompts


def _output(
    batch: ForwardBatch,
    drawn: torch.Tensor,
    drawing: list[int],
    prompts: list[_PromptRows],
    failures: list[str | None],
) -> LogitsProcessorOutput:
    input_logprobs: list[list[TokenLogprob] | None] = [None] * batch.batch_size
    for prompt in prompts:
        if prompt.failed:
            failures[prompt.request] = NOT_FINITE
        else:
            input_logprobs[prompt.request] = prompt.entries
    return LogitsProcessorOutput(
        drawn, drawing, None if batch.logprob_requests is None else input_logprobs, failures
    )


def _failures_of_parts(hidden: torch.Tensor, batch: ForwardBatch) -> list[str | None]:
    """One entry a request: why it failed, where nothing is drawn and its last row is not finite.

    The last row has attended to all before it. No logits would show the failure, and what the request left in
    the cache must not be kept: masked values that are not finite spread to the rows before them, which other
    requests may share.
    """
    failures: list[str | None] = [None] * batch.batch_size
    unfinished = [b for b, state in enumerate(batch.sampling_states) if state is None]
    if unfinished:
        last = hidden[torch.tensor(_last_rows(batch, unfinished), dtype=torch.int64, device=hidden.device)]
        for b, finite in zip(unfinished, torch.isfinite(last).all(dim=-1).tolist(), strict=True):
            failures[b] = None if finite else NOT_FINITE
    return failures


def _last_rows(batch: ForwardBatch, requests: list[int]) -> list[int]:
    """The last row of each of these requests."""
    ends: list[int] = []
    end = 0
    for count in batch.extend_lens:
        end += count
        ends.append(end - 1)
    return [ends[b] for b in requests]

"""Owns the target's own texts: many prompts decoded side by side, captured on the way, loops dropped.

Run by the training command and by the overfit helper of tests. It must not decide which prompts there are.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from train_draft.prompts import Kind
from train_draft.target import Captured, PlainTarget
from train_draft.texts import LoopFilter, Text, as_ids

Progress = Callable[[str], None]
# Reading one prompt alone takes as long as reading a few together.
_PROMPTS_TOGETHER = 8

Sink = Callable[[list[Text], list[int]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How texts are drawn: `sampled_share` of the prompts at `temperature`, the rest greedily.

    Generation ends before the last prompt once the kept texts have `enough` tokens.
    """

    new_tokens: int = 128
    rows: int = 64
    sampled_share: float = 0.0
    temperature: float = 0.8
    seed: int = 0
    keep_loops: bool = False
    enough: int | None = None
    shard_size: int = 64

    def is_greedy(self, index: int) -> bool:
        """Is this prompt answered greedily? It hangs on seed and index alone."""
        return random.Random(f"{self.seed}/{index}").random() >= self.sampled_share

    def generator(self, index: int) -> torch.Generator | None:
        """The random numbers of one prompt, whatever is decoded beside it; None where it is greedy."""
        if self.is_greedy(index):
            return None
        return torch.Generator().manual_seed(self.seed * 1_000_003 + index)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt in tokens; `index` is its place in the run."""

    index: int
    kind: Kind
    ids: list[int]


@dataclass(slots=True)
class _Row:
    """A text that is being written, in one row of the cache."""

    question: Question
    generator: torch.Generator | None
    ids: list[int]
    loops: LoopFilter = field(default_factory=LoopFilter)


def generate(
    target: PlainTarget, questions: Sequence[Question], plan: Plan, sink: Sink, progress: Progress
) -> None:
    """Answer every question; `sink` gets finished texts and the indices of dropped ones, shard by shard."""
    if questions:
        _Generation(target, questions, plan, sink, progress).run()


class _Generation:
    def __init__(
        self,
        target: PlainTarget,
        questions: Sequence[Question],
        plan: Plan,
        sink: Sink,
        progress: Progress,
    ) -> None:
        self.target = target
        self.plan = plan
        self.sink = sink
        self.progress = progress
        self.waiting = deque(questions)
        self.total = len(questions)
        max_len = max(len(question.ids) for question in questions) + plan.new_tokens
        hidden = target.config.hidden_size
        self.cache = target.empty_cache(plan.rows, max_len)
        self.features = torch.empty(plan.rows, max_len, hidden * len(target.aux_layers), dtype=target.dtype)
        self.final = torch.empty(plan.rows, max_len, hidden, dtype=target.dtype)
        self.rows: list[_Row | None] = [None] * plan.rows
        self.finished: list[Text] = []
        self.dropped: list[int] = []
        self.num_done = self.num_dropped = self.num_tokens = self.num_kept = 0
        self.started = time.perf_counter()

    def run(self) -> None:
        """Fill free rows, then decode one token for all of them, until nothing is left or it is enough."""
        enough = self.plan.enough
        while (self.waiting or any(self.rows)) and (enough is None or self.num_kept < enough):
            free = [place for place, row in enumerate(self.rows) if row is None]
            if self.waiting and len(free) >= min(_PROMPTS_TOGETHER, self.plan.rows):
                self._read_prompts(free)
            self._decode()
            if len(self.finished) >= self.plan.shard_size:
                self._flush()
        self._flush()

    def _read_prompts(self, free: list[int]) -> None:
        """Give the free rows the next prompts; those that are read together are about equally long."""
        places = free[: len(self.waiting)]
        questions = sorted((self.waiting.popleft() for _ in places), key=lambda question: len(question.ids))
        for first in range(0, len(places), _PROMPTS_TOGETHER):
            some = slice(first, first + _PROMPTS_TOGETHER)
            self._read(places[some], questions[some])

    def _read(self, places: list[int], questions: list[Question]) -> None:
        for place, question in zip(places, questions):
            self.rows[place] = _Row(question, self.plan.generator(question.index), list(question.ids))
        lengths = as_ids([len(question.ids) for question in questions])
        width = int(lengths.max())
        ids = torch.zeros(len(questions), width, dtype=torch.int64)
        for line, question in zip(ids, questions):
            line[: len(question.ids)] = as_ids(question.ids)
        rows = as_ids(places)
        captured = self.target.forward(ids, torch.zeros_like(lengths), self.cache, rows)
        self.features[rows, :width] = captured.features
        self.final[rows, :width] = captured.final
        self._append(places, captured.final[torch.arange(len(questions)), lengths - 1])

    def _decode(self) -> None:
        """One token for every row; the newest token of a row has not been read yet."""
        active = [place for place, row in enumerate(self.rows) if row is not None]
        if not active:
            return
        newest = torch.zeros(len(self.rows), 1, dtype=torch.int64)
        starts = torch.zeros(len(self.rows), dtype=torch.int64)
        for place, row in enumerate(self.rows):
            if row is not None:
                newest[place] = row.ids[-1]
                starts[place] = len(row.ids) - 1
        captured: Captured = self.target.forward(newest, starts, self.cache)
        everyone = torch.arange(len(self.rows))
        self.features[everyone, starts] = captured.features[:, 0]
        self.final[everyone, starts] = captured.final[:, 0]
        self._append(active, captured.final[active, 0])

    def _append(self, places: list[int], final: Tensor) -> None:
        logits = F.linear(final, self.target.head)
        best = best_tokens(final, logits, self.target.head).tolist()
        ends = self.target.config.eos_token_ids
        for place, token, scores in zip(places, best, logits):
            row = self.rows[place]
            assert row is not None
            if row.generator is not None:
                chances = (scores.float() / self.plan.temperature).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=row.generator))
            row.ids.append(token)
            self.num_tokens += 1
            if not self.plan.keep_loops and row.loops.is_loop(token):
                self._finish(place, row, dropped=True)
            elif token in ends or len(row.ids) - len(row.question.ids) == self.plan.new_tokens:
                self._finish(place, row, dropped=False)

    def _finish(self, place: int, row: _Row, dropped: bool) -> None:
        self.rows[place] = None
        self.num_done += 1
        question = row.question
        if dropped:
            self.num_dropped += 1
            self.dropped.append(question.index)
            return
        self.num_kept += len(row.ids) - len(question.ids)
        seen = len(row.ids) - 1
        features, final = self.features[place, :seen].clone(), self.final[place, :seen].clone()
        self.finished.append(
            Text(question.index, question.kind, len(question.ids), as_ids(row.ids), features, final)
        )

    def _flush(self) -> None:
        if not self.finished and not self.dropped:
            return
        self.sink(self.finished, self.dropped)
        self.finished, self.dropped = [], []
        rate = self.num_tokens / (time.perf_counter() - self.started)
        self.progress(
            f"generation: {self.num_done} of {self.total} prompts, {self.num_kept} tokens kept, "
            f"{self.num_dropped} loops dropped, {rate:.0f} tokens/s"
        )


def best_tokens(final: Tensor, logits: Tensor, head: Tensor, candidates: int = 4) -> Tensor:
    """The best token of each row [rows], the best few of `logits` [rows, vocab] scored again in fp32.

    In bf16 the best two tokens are often equal after rounding; a server that runs in fp32 tells them apart.
    Ties go to the smaller id.
    """
    few = logits.topk(candidates, dim=-1).indices.sort(-1).values
    exact = (head[few].float() * final.float()[:, None]).sum(-1)
    return few.gather(1, exact.argmax(-1, keepdim=True))[:, 0]

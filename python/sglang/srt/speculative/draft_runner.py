"""Owns a draft model's forwards: one level of a tree, a prompt, the accepted tokens of a round.

Used by drafters with a model, always inside their scope. It must not know which tokens to feed or where a
draft's state is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.layers.attention.base_attn_backend import KVPool
from sglang.srt.model_executor.model_runner import Model, ModelRunner
from sglang.srt.speculative.draft_tree import Frontier
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import VerifiedRound


class DraftOutput(NamedTuple):
    """`logits` [scored rows, draft vocabulary] and, of an EAGLE draft, its stream [all rows, hidden]."""

    logits: torch.Tensor
    stream: torch.Tensor | None


class DraftRunner(Generic[Model]):
    """A draft's model over the target's slots."""

    def __init__(self, load: Callable[[torch.dtype, torch.device], Model]) -> None:
        self.runner = ModelRunner(load)

    @property
    def model(self) -> Model:
        return self.runner.model

    def init_attention_backend(self, kv: KVPool, req_to_token: torch.Tensor) -> None:
        self.runner.init_attention_backend(kv, req_to_token)

    def level(
        self,
        round: Round,
        frontier: Frontier,
        positions: torch.Tensor,
        *,
        first: int,
        hidden: torch.Tensor | None = None,
    ) -> DraftOutput:
        """One forward over the nodes of a level, [batch, rows] each, whose slots begin at `first`.

        `hidden` [batch, rows, features] is what each node goes on from.
        """
        width = frontier.token_ids.shape[1]
        spec = SpecInput(
            width,
            hidden=None if hidden is None else hidden.reshape(-1, hidden.shape[-1]),
            tail_mask=frontier.tail_mask,
        )
        return self._run(
            round.forward_batch(
                ForwardMode.DECODE,
                frontier.token_ids,
                positions,
                first=first,
                spec=spec,
                logit_rows_each=width,
            )
        )

    def prompts(
        self, batch: ForwardBatch, token_ids: torch.Tensor, hidden: torch.Tensor | None, *, scores: bool
    ) -> DraftOutput:
        """The rows of the target's EXTEND batch with other tokens; the last row of each request is scored."""
        rows = last_rows(batch) if scores else batch.positions.new_empty(0)
        spec = SpecInput(0, hidden=hidden, logit_rows=rows)
        return self._run(
            replace(
                batch,
                input_ids=token_ids,
                spec=spec,
                dp_step=None if batch.dp_step is None else prompts_step(batch.dp_step, scores=scores),
                capture_hidden=False,
            )
        )

    def accepted(
        self, verified: VerifiedRound, token_ids: torch.Tensor, hidden: torch.Tensor | None, *, scores: bool
    ) -> DraftOutput:
        """The rows of a verified round [batch, N]; that of the last accepted node is scored.

        What lies behind it is of no meaning, and the next round writes its slots again.
        """
        round, width = verified.round, verified.width
        rows = verified.last_rows() if scores else token_ids.new_empty(0)
        offsets = torch.arange(width, device=token_ids.device)
        return self._run(
            round.forward_batch(
                ForwardMode.DRAFT_EXTEND,
                token_ids,
                round.lengths[:, None] + offsets,
                spec=SpecInput(width, hidden=hidden, logit_rows=rows),
                logit_rows_each=int(scores),
            )
        )

    def idle(self, step: DpStep) -> None:
        """This replica's part of a forward of the others."""
        self.runner.forward(ForwardBatch.idle(step, self.runner.device))

    def _run(self, batch: ForwardBatch) -> DraftOutput:
        output = self.runner.forward(batch)
        return DraftOutput(output.logits, output.hidden)


def last_rows(batch: ForwardBatch) -> torch.Tensor:
    """The last row of each request of an EXTEND batch."""
    return torch.tensor(batch.extend_lens, device=batch.input_ids.device).cumsum(0) - 1


def shifted_ids(batch: ForwardBatch, next_ids: torch.Tensor) -> torch.Tensor:
    """The token after each row of an EXTEND batch, [num_tokens]; `next_ids` [batch] follow the last rows."""
    token_ids = batch.input_ids.roll(-1)
    token_ids[last_rows(batch)] = next_ids
    return token_ids


def prompts_step(step: DpStep, *, scores: bool) -> DpStep:
    """The step of a draft's forward over prompts: the tokens of the target's, and a row each to score."""
    rows = step.num_requests if scores else [0] * len(step.num_requests)
    return replace(step, num_logit_rows=rows)


def best_children(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `topk` most likely ids of each row [rows, topk], and their probabilities; a chain needs none."""
    if topk == 1:
        return logits.argmax(dim=-1, keepdim=True), None
    best = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    return best.indices, best.values


def check_topk(topk: int, vocab_size: int) -> None:
    """`ValueError` where a draft has fewer tokens than a node may have branches."""
    if topk > vocab_size:
        raise ValueError(
            f"--speculative-eagle-topk {topk} is more than the {vocab_size} tokens that the draft may "
            "propose; lower it"
        )

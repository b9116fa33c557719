"""Owns EAGLE and EAGLE3: a small draft that reads the target's hidden rows and goes on from its own stream.

Made by the registry. Row p of the draft lies in the target's slot of position p: it reads the target's hidden
row p and token p + 1, and predicts token p + 2 (draft and target have one slot space). An EAGLE3 draft works
in one tensor group, so under attention data parallelism it owns its attention; an EAGLE draft follows the
target's layout. Sources: arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import KVPools
from sglang.srt.models.drafts.registry import DraftModel
from sglang.srt.runtime_context import max_speculative_num_draft_tokens
from sglang.srt.speculative.adaptive import AdaptiveSteps
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.draft_runner import (
    DraftRunner,
    best_children,
    check_topk,
    last_rows,
    prompts_step,
    shifted_ids,
)
from sglang.srt.speculative.draft_tree import DraftBeam, DraftShape
from sglang.srt.speculative.proposals import propose_sampled
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.speculative.verify import VerifiedRound


class EagleDrafter:
    """Drafts with an EAGLE head.

    `owns_attention` is stated once: every phase enters its scope through it. With `draws_proposals` a chain
    is drawn from the draft's own distribution, which acceptance compares with the target's. `adaptive`
    chooses the depth of chains while running.
    """

    captures_hidden = True
    num_recent_ids = 0

    def __init__(
        self,
        load: Callable[[torch.dtype, torch.device], DraftModel],
        shape: DraftShape,
        *,
        owns_attention: bool,
        draws_proposals: bool = False,
        adaptive: AdaptiveSteps | None = None,
    ) -> None:
        self.owns_attention = owns_attention
        self._shape = shape
        self._draws_proposals = draws_proposals
        self._adaptive = adaptive
        self._is_cut_short = False  # the pool had no room for a whole round
        most_nodes = max(shape.num_nodes, max_speculative_num_draft_tokens() or 0)
        # The root and its tree, or one frontier a level but the last one.
        self.slots_per_step = max(most_nodes, shape.topk * (shape.num_steps - 1))
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft = DraftRunner(load)
        check_topk(shape.topk, self._draft.model.vocab_size)
        self.kv_specs = (self._draft.runner.kv_spec,)

    def init_pools(self, pools: KVPools) -> None:
        table = pools.req_to_token
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft.init_attention_backend(pools.drafts[0], table.req_to_token)
        # What the next round of each request starts from, by its row of the table: the first level of its
        # tree, and the stream that this level goes on from. It is written whenever a request has got a token.
        runner, topk = self._draft.runner, self._shape.topk
        if self._draws_proposals:
            vocab_size = self._draft.model.vocab_size
            self._first_logits = torch.zeros(table.size, vocab_size, device=runner.device)
        self._first_ids = torch.zeros(table.size, topk, dtype=torch.int64, device=runner.device)
        self._first_probs = torch.zeros(table.size, topk, device=runner.device)
        self._streams = torch.zeros(
            table.size, self._draft.model.hidden_size, dtype=runner.dtype, device=runner.device
        )

    def num_nodes(self, batch_size: int, slots: int) -> int:
        self._is_cut_short = slots < self.slots_per_step
        if self._is_cut_short:
            return 1
        return self._shape.num_nodes if self._adaptive is None else self._adaptive.steps_for(batch_size) + 1

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            output = self._draft.prompts(batch, shifted_ids(batch, next_ids), hidden, scores=True)
        assert output.stream is not None
        self._remember(batch.req_pool_indices, output.logits, output.stream[last_rows(batch)])

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        if num_nodes == 1:
            return Proposal.nothing(round)
        topk = self._shape.topk
        shape = self._shape if topk > 1 else DraftShape(1, num_nodes - 1, num_nodes)
        rows = round.req_pool_indices
        beam = DraftBeam(shape, round.root_ids)
        q: list[torch.Tensor] = []
        if self._draws_proposals:
            beam.grow(self._drawn(self._first_logits[rows], round, q))
        else:
            beam.grow(self._first_ids[rows], self._first_probs[rows])
        stream = self._streams[rows][:, None]  # [batch, rows of the level before, hidden]
        with draft_tp_context(owns_attention=self.owns_attention):
            for level in range(1, shape.num_steps):
                frontier = beam.frontier
                parents = frontier.parent_rows[:, :, None].expand(-1, -1, stream.shape[-1])
                output = self._draft.level(
                    round,
                    frontier,
                    (round.lengths + level - 1)[:, None].expand_as(frontier.token_ids),
                    first=(level - 1) * topk,
                    hidden=stream.gather(1, parents),
                )
                if self._draws_proposals:
                    beam.grow(self._drawn(output.logits, round, q))
                else:
                    beam.grow(*self._children(output.logits))
                assert output.stream is not None
                stream = output.stream.view(round.batch_size, -1, output.stream.shape[-1])
        return Proposal(beam.tree(), torch.stack(q, dim=1) if q else None)

    def after_accepted(self, verified: VerifiedRound) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            output = self._draft.accepted(verified, verified.next_ids, verified.hidden, scores=True)
        assert output.stream is not None
        self._remember(verified.round.req_pool_indices, output.logits, output.stream[verified.last_rows()])
        if self._adaptive is not None and not self._is_cut_short:
            self._adaptive.note_round(len(verified.counts), [count - 1 for count in verified.counts])

    def idle_prompts(self, step: DpStep) -> None:
        if self.owns_attention:
            return
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.idle(prompts_step(step, scores=True))

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        if self.owns_attention or num_nodes == 1:
            return
        topk = self._shape.topk
        with draft_tp_context(owns_attention=self.owns_attention):
            for _ in range(1, self._shape.num_steps):
                self._draft.idle(step.of_phase(rows=topk, logit_rows=topk))

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        if self.owns_attention:
            return
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.idle(step.of_phase(rows=num_nodes, logit_rows=1))

    def _remember(self, req_pool_indices: torch.Tensor, logits: torch.Tensor, stream: torch.Tensor) -> None:
        self._streams[req_pool_indices] = stream
        if self._draws_proposals:
            self._first_logits[req_pool_indices] = logits
            return
        ids, probs = self._children(logits)
        self._first_ids[req_pool_indices] = ids
        if probs is not None:
            self._first_probs[req_pool_indices] = probs

    def _children(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The best children of each row, as ids of the target."""
        ids, probs = best_children(logits, self._shape.topk)
        target_ids: torch.Tensor = self._draft.model.target_ids(ids)
        return target_ids, probs

    @staticmethod
    def _drawn(logits: torch.Tensor, round: Round, q: list[torch.Tensor]) -> torch.Tensor:
        """The next token of each chain [batch, 1], drawn from the draft; its distribution goes into `q`."""
        token_ids, probs = propose_sampled(logits, round.sampling_states, len(q))
        q.append(probs)
        return token_ids[:, None]

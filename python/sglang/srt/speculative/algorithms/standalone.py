"""Owns STANDALONE: a whole small model with the target's tokens drafts by itself.

Made by the registry. The draft reads tokens at their true positions, in the target's slots: a round feeds the
root and then the levels of the tree, and what was accepted is fed once more at its place. It sees nothing of
the target, and under attention data parallelism it follows the target's layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import KVPools
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.draft_runner import DraftRunner, best_children, check_topk, prompts_step
from sglang.srt.speculative.draft_tree import DraftBeam, DraftShape
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.speculative.verify import VerifiedRound


class StandaloneDrafter:
    """Drafts with a model of its own.

    `reach` is how many positions that model knows: beyond them it guesses at its last one, for what it is
    worth.
    """

    owns_attention = False
    captures_hidden = False
    num_recent_ids = 0

    def __init__(
        self,
        load: Callable[[torch.dtype, torch.device], DecoderForCausalLM],
        shape: DraftShape,
        *,
        reach: int,
    ) -> None:
        self._shape = shape
        self._reach = reach
        # The root, and one frontier a level but the last one; beside the target's nodes.
        self.slots_per_step = max(shape.num_nodes, 1 + shape.topk * (shape.num_steps - 1))
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft = DraftRunner(load)
        check_topk(shape.topk, self._draft.model.lm_head.vocab_size)
        self.kv_specs = (self._draft.runner.kv_spec,)

    def init_pools(self, pools: KVPools) -> None:
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft.init_attention_backend(pools.drafts[0], pools.req_to_token.req_to_token)

    def num_nodes(self, batch_size: int, slots: int) -> int:
        return self._shape.num_nodes if slots >= self.slots_per_step else 1

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.prompts(batch, batch.input_ids, None, scores=False)

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        if num_nodes == 1:
            return Proposal.nothing(round)
        shape = self._shape
        beam = DraftBeam(shape, round.root_ids, root_in_tail=True)
        first = 0
        with draft_tp_context(owns_attention=self.owns_attention):
            for depth in range(shape.num_steps):
                frontier = beam.frontier
                positions = (round.lengths + depth).clamp(max=self._reach - 1)
                width = frontier.token_ids.shape[1]
                output = self._draft.run(
                    depth,
                    round.forward_batch(
                        ForwardMode.DECODE,
                        frontier.token_ids,
                        positions[:, None].expand(-1, width),
                        first=first,
                        spec=SpecInput(width, tail_mask=frontier.tail_mask),
                        logit_rows_each=width,
                    ),
                )
                beam.grow(*best_children(output.logits, shape.topk))
                first += width
        return Proposal(beam.tree())

    def after_accepted(self, verified: VerifiedRound) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.run(0, verified.draft_batch(verified.node_ids, logit_rows_each=0))

    def idle_prompts(self, step: DpStep) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.idle(prompts_step(step, scores=False))

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        if num_nodes == 1:
            return
        with draft_tp_context(owns_attention=self.owns_attention):
            for depth in range(self._shape.num_steps):
                rows = self._shape.topk if depth else 1
                self._draft.idle(step.of_phase(rows=rows, logit_rows=rows))

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.idle(step.of_phase(rows=num_nodes, logit_rows=0))

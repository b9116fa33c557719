"""Owns STANDALONE: a whole small model with the target's tokens drafts by itself.

Made by the registry. The draft reads tokens at their true positions, in the target's slots: a round feeds the
root and then the levels of the tree, and what was accepted is fed once more at its place. It sees nothing of
the target, and under attention data parallelism it follows the target's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner_components.graph_setup import graph_sizes
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import KVPools
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.srt.model_executor.runner_utils.buffers import BufferSpec
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.deferred_rows import DeferredRows
from sglang.srt.speculative.draft_graph_runner import DraftUnitRunner, DraftWork, verify_shape
from sglang.srt.speculative.draft_runner import (
    DraftRunner,
    best_children,
    check_topk,
    prompts_step,
    recorded_graphs,
)
from sglang.srt.speculative.draft_steps import grow_trees_from_roots, take_in_tokens
from sglang.srt.speculative.draft_tree import DraftShape
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
        self._deferred = DeferredRows()
        # The rows of a request on each level: the root, then one frontier a level but the last one.
        self._widths = [1, *[shape.topk] * (shape.num_steps - 1)]
        self.slots_per_step = max(
            shape.num_nodes, sum(self._widths)
        )  # the target's nodes, or the draft's rows
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft = DraftRunner(load)
        children = partial(best_children, topk=shape.topk)
        self._levels = DraftUnitRunner(partial(grow_trees_from_roots, shape, children), self._draft.run)
        self._accepted = DraftUnitRunner(take_in_tokens, self._draft.run)
        check_topk(shape.topk, self._draft.model.lm_head.vocab_size)
        self.kv_specs = (self._draft.runner.kv_spec,)

    def init_pools(self, pools: KVPools) -> None:
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft.init_attention_backend(pools.drafts[0], pools.req_to_token.req_to_token)

    def num_nodes(self, batch_size: int, slots: int) -> int:
        return self._shape.num_nodes if slots >= self.slots_per_step else 1

    @property
    def verify_shape(self) -> ForwardShape:
        return verify_shape(self._shape)

    def init_graphs(
        self, make_backend: Callable[[], GraphBackend], table: ReqToTokenPool, *, max_requests: int
    ) -> None:
        """Record both units of a round for up to `max_requests` requests; other rounds go on as before."""
        shape = self._shape
        levels = [ForwardShape(ForwardMode.DECODE, 1)]
        for level in range(1, shape.num_steps):
            tail = 0 if shape.is_chain else sum(self._widths[: level + 1])
            levels.append(ForwardShape(ForwardMode.DECODE, shape.topk, tail, mask_in_unit=tail > 0))
        accepted = [ForwardShape(ForwardMode.DRAFT_EXTEND, shape.num_nodes)]
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            for unit, shapes, inputs in (
                (self._levels, levels, [BufferSpec("root_ids")]),
                (self._accepted, accepted, []),
            ):
                self._draft.record(
                    unit,
                    shapes,
                    inputs,
                    sizes=graph_sizes(table, width=shape.num_nodes, max_requests=max_requests),
                    make_backend=make_backend,
                    scope=lambda: draft_tp_context(owns_attention=self.owns_attention),
                )

    @property
    def graphs(self) -> list[CapturedGraphs]:
        """What has to be recorded anew when weights move; empty without graphs."""
        return recorded_graphs((self._levels, self._accepted))

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        self._deferred.forget(batch.req_pool_indices)
        self._read(batch)

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        if num_nodes == 1:
            return Proposal.nothing(round)
        self._catch_up(round)
        batches = []
        for level, width in enumerate(self._widths):
            batch = round.draft_level(level + 1, width, first=sum(self._widths[:level]))
            batches.append(replace(batch, positions=batch.positions.clamp(max=self._reach - 1)))
        with draft_tp_context(owns_attention=self.owns_attention):
            outputs = self._levels.run(DraftWork.of(round, {"root_ids": round.root_ids}, batches))
        return Proposal(DraftTree(**outputs, is_chain=self._shape.is_chain))

    def after_accepted(self, verified: VerifiedRound) -> None:
        if verified.width == 1 and get_parallel().attn_dp_size == 1:  # idle replicas put nothing off
            self._deferred.put_off(verified, verified.node_ids[:, 0].tolist())
            if self._deferred.is_due:
                self._catch_up(verified.round, accepted=1)
            return
        batch = verified.draft_batch(verified.node_ids, logit_rows_each=0)
        with draft_tp_context(owns_attention=self.owns_attention):
            self._accepted.run(DraftWork.of(verified.round, {}, [batch]))

    def _catch_up(self, round: Round, *, accepted: int = 0) -> None:
        """Read what these requests have put off, so that a round may draft again."""
        taken = self._deferred.take(round, accepted=accepted)
        if taken is not None:
            self._read(taken[0])

    def _read(self, batch: ForwardBatch) -> None:
        """Compute the rows of an EXTEND batch."""
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.prompts(batch, batch.input_ids, None, scores=False)

    def idle_prompts(self, step: DpStep) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._draft.idle(prompts_step(step, scores=False))

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        if num_nodes == 1:
            return
        with draft_tp_context(owns_attention=self.owns_attention):
            self._levels.run(self._draft.idle_work(step, [(width, width) for width in self._widths]))

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        with draft_tp_context(owns_attention=self.owns_attention):
            self._accepted.run(self._draft.idle_work(step, [(num_nodes, 0)]))

"""Owns EAGLE and EAGLE3: a small draft that reads the target's hidden rows and goes on from its own stream.

Made by the registry. Row p of the draft lies in the target's slot of position p: it reads the target's hidden
row p and token p + 1, and predicts token p + 2 (draft and target have one slot space). An EAGLE3 draft works
in one tensor group, so under attention data parallelism it owns its attention; an EAGLE draft follows the
target's layout. Sources: arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable
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
from sglang.srt.models.drafts.registry import DraftModel
from sglang.srt.runtime_context import get_parallel, max_speculative_num_draft_tokens
from sglang.srt.speculative.adaptive import AdaptiveSteps
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.deferred_rows import DeferredRows
from sglang.srt.speculative.draft_graph_runner import DraftUnitRunner, DraftWork, verify_shape
from sglang.srt.speculative.draft_runner import (
    DraftRunner,
    best_children,
    check_topk,
    last_rows,
    prompts_step,
    recorded_graphs,
    shifted_ids,
)
from sglang.srt.speculative.draft_steps import grow_trees, take_in_accepted
from sglang.srt.speculative.draft_tree import DraftShape
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
        self._deferred = DeferredRows()
        most_nodes = max(shape.num_nodes, max_speculative_num_draft_tokens() or 0)
        # The root and its tree, or one frontier a level but the last one.
        self.slots_per_step = max(most_nodes, shape.topk * (shape.num_steps - 1))
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            self._draft = DraftRunner(load)
        self._levels = DraftUnitRunner(partial(grow_trees, shape, self._children), self._draft.run)
        self._accepted = DraftUnitRunner(take_in_accepted, self._draft.run)
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

    @property
    def verify_shape(self) -> ForwardShape:
        return verify_shape(self._shape)

    def init_graphs(
        self, make_backend: Callable[[], GraphBackend], table: ReqToTokenPool, *, max_requests: int
    ) -> None:
        """Record both units of a round for up to `max_requests` requests; other rounds go on as before.

        Chains that are drawn draw on the host, so only what takes their tokens in is recorded.
        """
        shape, model = self._shape, self._draft.model
        sizes = graph_sizes(table, width=shape.num_nodes, max_requests=max_requests)
        dtype, topk = self._draft.runner.dtype, shape.topk
        is_tree = topk > 1
        levels = [
            ForwardShape(ForwardMode.DECODE, topk, tail=level * topk if is_tree else 0, mask_in_unit=is_tree)
            for level in range(1, shape.num_steps)
        ]
        first = [
            BufferSpec("root_ids"),
            BufferSpec("first_ids", shape=(topk,)),
            BufferSpec("first_probs", dtype=torch.float32, shape=(topk,)),
            BufferSpec("stream", dtype=dtype, shape=(model.hidden_size,)),
        ]
        accepted = [
            BufferSpec("hidden", dtype=dtype, rows=shape.num_nodes, shape=(self._draft.model.feature_width,)),
            BufferSpec("last"),
        ]
        units = [(self._accepted, [ForwardShape(ForwardMode.DRAFT_EXTEND, shape.num_nodes)], accepted)]
        if levels and not self._draws_proposals:
            units.append((self._levels, levels, first))
        with draft_tp_context(owns_attention=self.owns_attention), draft_pp_context():
            for unit, shapes, inputs in units:
                self._draft.record(
                    unit,
                    shapes,
                    inputs,
                    sizes=sizes,
                    make_backend=make_backend,
                    scope=lambda: draft_tp_context(owns_attention=self.owns_attention),
                )

    @property
    def graphs(self) -> list[CapturedGraphs]:
        """What has to be recorded anew when weights move; empty without graphs."""
        return recorded_graphs((self._levels, self._accepted))

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        self._deferred.forget(batch.req_pool_indices)
        self._read(batch, shifted_ids(batch, next_ids), hidden)

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        if num_nodes == 1:
            return Proposal.nothing(round)
        self._catch_up(round)
        topk = self._shape.topk
        shape = self._shape if topk > 1 else DraftShape(1, num_nodes - 1, num_nodes)
        rows = round.req_pool_indices
        inputs = {"root_ids": round.root_ids, "stream": self._streams[rows]}
        batches = [
            round.draft_level(level, topk, first=(level - 1) * topk) for level in range(1, shape.num_steps)
        ]
        q: list[torch.Tensor] = []
        if self._draws_proposals:
            inputs |= {"first_ids": self._drawn(self._first_logits[rows], round, q)}
        else:
            inputs |= {"first_ids": self._first_ids[rows], "first_probs": self._first_probs[rows]}
        with draft_tp_context(owns_attention=self.owns_attention):
            if self._draws_proposals:
                outputs = grow_trees(
                    shape,
                    lambda logits: (self._drawn(logits, round, q), None),
                    inputs,
                    batches,
                    self._draft.run,
                )
            elif shape == self._shape:
                outputs = self._levels.run(DraftWork.of(round, inputs, batches))
            else:  # a depth that was chosen while running
                outputs = grow_trees(shape, self._children, inputs, batches, self._draft.run)
        tree = DraftTree(**outputs, is_chain=topk == 1)
        return Proposal(tree, torch.stack(q, dim=1) if q else None)

    def after_accepted(self, verified: VerifiedRound) -> None:
        assert verified.hidden is not None
        if verified.width == 1 and get_parallel().attn_dp_size == 1:  # idle replicas put nothing off
            self._deferred.put_off(verified, [drawn[0] if drawn else 0 for drawn in verified.drawn])
            if self._deferred.is_due:
                self._catch_up(verified.round, accepted=1)
            self._note(verified)
            return
        batch = verified.draft_batch(verified.next_ids, logit_rows_each=1)
        inputs = {"hidden": verified.hidden, "last": verified.last_places()}
        with draft_tp_context(owns_attention=self.owns_attention):
            outputs = self._accepted.run(DraftWork.of(verified.round, inputs, [batch]))
        self._remember(verified.round.req_pool_indices, outputs["logits"], outputs["stream"])
        self._note(verified)

    def _note(self, verified: VerifiedRound) -> None:
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
        levels = [(topk, topk)] * (self._shape.num_steps - 1)
        with draft_tp_context(owns_attention=self.owns_attention):
            self._levels.run(self._draft.idle_work(step, levels))

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        if self.owns_attention:
            return
        with draft_tp_context(owns_attention=self.owns_attention):
            self._accepted.run(self._draft.idle_work(step, [(num_nodes, 1)]))

    def _catch_up(self, round: Round, *, accepted: int = 0) -> None:
        """Read what these requests have put off, so that a round may draft again."""
        taken = self._deferred.take(round, accepted=accepted)
        if taken is not None:
            batch, hidden = taken
            self._read(batch, batch.input_ids, hidden)

    def _read(self, batch: ForwardBatch, token_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Compute the rows of an EXTEND batch, and remember what each of its requests goes on from."""
        with draft_tp_context(owns_attention=self.owns_attention):
            output = self._draft.prompts(batch, token_ids, hidden, scores=True)
        assert output.hidden is not None
        self._remember(batch.req_pool_indices, output.logits, output.hidden[last_rows(batch)])

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

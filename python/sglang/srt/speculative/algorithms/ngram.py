"""Owns NGRAM: what the running requests have written before is proposed again where it fits.

Made by the registry. It has no model: proposals come from a trie of token n-grams on the host of the leader,
and its peers hear the trees. It must not read prompts of other users into an answer in any other way: a
proposal is only ever what the target draws itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import KVPools
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.algorithms.ngram_corpus import NgramCorpus
from sglang.srt.speculative.algorithms.ngram_tree import NgramTrees
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import VerifiedRound


class NgramDrafter:
    """Drafts from the texts that were generated since the start."""

    captures_hidden = False
    kv_specs: Sequence[KVSpec] = ()

    def __init__(self, corpus: NgramCorpus, trees: NgramTrees, *, num_nodes: int) -> None:
        self._corpus = corpus
        self._trees = trees
        self._num_nodes = self.slots_per_step = num_nodes
        self.num_recent_ids = corpus.max_depth - 1

    def init_pools(self, pools: KVPools) -> None:
        """Nothing is cached for a draft."""

    @property
    def verify_shape(self) -> ForwardShape:
        return ForwardShape(ForwardMode.TARGET_VERIFY, self._num_nodes, tail=self._num_nodes)

    def init_graphs(
        self, make_backend: Callable[[], GraphBackend], table: ReqToTokenPool, *, max_requests: int
    ) -> None:
        """It runs no model."""

    def num_nodes(self, batch_size: int, slots: int) -> int:
        return self._num_nodes if slots >= self._num_nodes else 1

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        """A prompt is no generated text."""

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        if num_nodes == 1:
            return Proposal.nothing(round)
        assert round.recent_ids is not None  # the scheduler was asked for them
        if get_parallel().is_attn_tp_leader:
            packed = torch.tensor([self._trees.propose(ids) for ids in round.recent_ids])  # [batch, 2, N]
        else:  # overwritten by the leader's
            packed = torch.zeros(round.batch_size, 2, num_nodes, dtype=torch.int64)
        token_ids, parents = packed.to(round.root_ids.device).unbind(dim=1)
        return Proposal(DraftTree(token_ids, parents))

    def after_accepted(self, verified: VerifiedRound) -> None:
        if not get_parallel().is_attn_tp_leader:
            return
        recent_ids = verified.round.recent_ids
        assert recent_ids is not None
        for before, drawn in zip(recent_ids, verified.drawn, strict=True):
            if drawn:
                self._corpus.insert([*before, *drawn], len(drawn))

    def idle_prompts(self, step: DpStep) -> None:
        """Nothing is exchanged."""

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        """Nothing is exchanged."""

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        """Nothing is exchanged."""

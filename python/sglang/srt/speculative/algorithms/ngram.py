"""Owns NGRAM: what the running requests have written before is proposed again where it fits.

Made by the registry. It has no model: proposals come from a request's own text and from a trie of token
n-grams on the host of the leader, and its peers hear the trees. It must not read prompts of other users into
an answer in any other way: a proposal is only ever what the target draws itself.
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
from sglang.srt.speculative.algorithms.ngram_own_text import LEAST_MATCH, OWN_TEXT, continuation
from sglang.srt.speculative.algorithms.ngram_tree import NgramTrees
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import VerifiedRound

#: Tokens of a text that the corpus may lack.
_MOST_LATE = 16


class NgramDrafter:
    """Drafts from the texts that were generated since the start, and from a request's own."""

    captures_hidden = False
    kv_specs: Sequence[KVSpec] = ()

    def __init__(self, corpus: NgramCorpus, trees: NgramTrees, *, num_nodes: int) -> None:
        self._corpus = corpus
        self._trees = trees
        self._num_nodes = self.slots_per_step = num_nodes
        self._window = corpus.max_depth - 1
        #: How long an end of a text must be that is found again; 1: each round has guesses, good or bad.
        self.least_match = LEAST_MATCH
        self.num_recent_ids = max(self._window, OWN_TEXT)
        #: By row of the request table: the length of its text, and how many of its last tokens the corpus
        #: lacks. Rounds without guesses put them off: one by one they cost a walk for each place of a window.
        self._late: dict[int, tuple[int, int]] = {}

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
        parallel = get_parallel()
        found: list[tuple[list[int], list[int]] | None] = []
        if parallel.is_attn_tp_leader:
            self._learn(round, round.recent_ids, [0] * round.batch_size, most_late=0)
            found = [self._tree(ids) for ids in round.recent_ids]
        # All ranks of a tensor group verify equally many nodes, and only the leader knows what was found.
        if parallel.tp_size == 1 and not any(found):
            return Proposal.nothing(round)
        # Of a peer: overwritten by the leader's.
        packed = torch.zeros(round.batch_size, 2, num_nodes, dtype=torch.int64)
        for b, tree in enumerate(found):
            packed[b] = torch.tensor(tree or self._padding(round.recent_ids[b][-1]))
        token_ids, parents = packed.to(round.root_ids.device).unbind(dim=1)
        return Proposal(DraftTree(token_ids, parents))

    def _tree(self, token_ids: list[int]) -> tuple[list[int], list[int]] | None:
        """What is proposed after a text; None where it is like nothing that was there before."""
        own, _ = continuation(token_ids, self._num_nodes - 1)
        return self._trees.propose(token_ids, first=own, least_match=self.least_match)

    def _padding(self, root_id: int) -> tuple[list[int], list[int]]:
        """A tree of nodes under the root that mean nothing."""
        rest = self._num_nodes - 1
        return [root_id] + [0] * rest, [-1] + [0] * rest

    def after_accepted(self, verified: VerifiedRound) -> None:
        if not get_parallel().is_attn_tp_leader:
            return
        recent_ids = verified.round.recent_ids
        assert recent_ids is not None
        texts = [[*before, *drawn] for before, drawn in zip(recent_ids, verified.drawn, strict=True)]
        news = [len(drawn) for drawn in verified.drawn]
        self._learn(verified.round, texts, news, most_late=0 if verified.width > 1 else _MOST_LATE)

    def _learn(
        self, round: Round, texts: Sequence[list[int]], news: Sequence[int], *, most_late: int
    ) -> None:
        """Add what texts ended in since they were learnt from; up to `most_late` tokens of each may wait."""
        rows = round.req_pool_indices.tolist()
        for row, length, text, num_new in zip(rows, round.lengths_list, texts, news, strict=True):
            known, late = self._late.pop(row, (length, 0))
            late = num_new + (late if known == length else 0)  # else the row has got another request
            if late > most_late:
                self._corpus.insert(text[-(self._window + late) :], late)
            elif late:
                self._late[row] = (length + num_new, late)

    def idle_prompts(self, step: DpStep) -> None:
        """Nothing is exchanged."""

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        """Nothing is exchanged."""

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        """Nothing is exchanged."""

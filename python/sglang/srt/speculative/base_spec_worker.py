"""Owns what a draft algorithm is to the one loop that runs every round: the `Drafter`, as a type.

Implemented by the files in `algorithms/`, called by `spec_worker.py`. A drafter enters its own scopes: every
call here comes from the target's placement. It must not run the target, accept or schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import KVPools
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import VerifiedRound


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a draft proposes for a round.

    `q` [batch, N - 1, vocab] is what the tokens of a chain were drawn from, where acceptance compares it with
    the target's distribution; only the leader of an attention-TP group reads it.
    """

    tree: DraftTree
    q: torch.Tensor | None = None

    @classmethod
    def nothing(cls, round: Round) -> Proposal:
        """The roots alone: a round of plain decoding."""
        return cls(DraftTree.chain(round.root_ids[:, None]))


class Drafter(Protocol):
    """One draft algorithm on one rank.

    With attention data parallelism every rank takes part in every phase: a rank whose replica has no request
    calls `idle_prompts` or `idle_propose` and `idle_accepted` where the others call the phase itself.
    """

    @property
    def kv_specs(self) -> Sequence[KVSpec]:
        """What its models cache of each token, one entry a pool; empty without a model."""

    @property
    def slots_per_step(self) -> int:
        """The most slots that a round writes, of the target or of the draft, from a request's length on."""

    @property
    def captures_hidden(self) -> bool:
        """Whether it reads hidden rows of the target."""

    @property
    def num_recent_ids(self) -> int:
        """How many of the last tokens of each request it wants to see; 0: none."""

    def init_pools(self, pools: KVPools) -> None:
        """Attend over these pools and write into them; called once, before any other phase."""

    @property
    def verify_shape(self) -> ForwardShape:
        """The target's forward in a whole round."""

    def init_graphs(
        self, make_backend: Callable[[], GraphBackend], table: ReqToTokenPool, *, max_requests: int
    ) -> None:
        """Record its units of a whole round for up to `max_requests` requests; others go on as before."""

    def num_nodes(self, batch_size: int, slots: int) -> int:
        """Nodes (N) of the next round, the root included, for requests with `slots` slots each; 1 if few."""
        ...

    def after_prompts(self, batch: ForwardBatch, hidden: torch.Tensor | None, next_ids: torch.Tensor) -> None:
        """The target has computed an EXTEND batch; `next_ids` [batch] follow what each request brought.

        `hidden` [num_tokens, features] are the rows captured, where the drafter asks for them.
        """

    def propose(self, round: Round, num_nodes: int) -> Proposal:
        """Trees of `num_nodes` nodes under the roots of the round."""
        ...

    def after_accepted(self, verified: VerifiedRound) -> None:
        """Bring the draft's own state up to what was accepted."""

    def idle_prompts(self, step: DpStep) -> None:
        """This replica has no prompt, and others draft after theirs."""

    def idle_propose(self, step: DpStep, num_nodes: int) -> None:
        """This replica has no request, and others propose."""

    def idle_accepted(self, step: DpStep, num_nodes: int) -> None:
        """This replica has no request, and others go on from what was accepted."""

"""Owns how a rank's worker is made with the published algorithm, from the drafters that it is given.

Called where a rank builds its worker. It must not know any algorithm: `algorithms/served.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.accept import Accepted, follow
from sglang.srt.speculative.accept_coins import block_verification, rejection, target_only
from sglang.srt.speculative.base_spec_worker import Drafter, Proposal
from sglang.srt.speculative.draft_tree import DraftShape
from sglang.srt.speculative.spec_worker import AcceptRule, SpecWorker


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """What a drafter is made from: the target, and how many nodes a round verifies."""

    target: TpModelWorker
    num_nodes: int

    @property
    def shape(self) -> DraftShape:
        """The tree of a drafter that drafts level by level."""
        spec = get_spec()
        topk, steps = spec.speculative_eagle_topk, spec.speculative_num_steps
        if topk is None or steps is None:
            raise RuntimeError(
                "speculative_num_steps and speculative_eagle_topk are not resolved: run resolve() on the "
                "record before it is published, or publish numbers"
            )
        return DraftShape(topk, steps, self.num_nodes)


MakeDrafter = Callable[[DraftSetup], Drafter]


def _published_rule() -> AcceptRule:
    """How proposals are accepted; a round that proposes nothing is plain decoding under every rule."""
    spec = get_spec()
    single, acc = spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc
    compare = block_verification if spec.speculative_use_block_verification else rejection

    def accept(proposal: Proposal, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Accepted]:
        if proposal.q is not None:
            return compare(proposal.tree, logits, states, proposal.q)
        if single < 1.0 or acc < 1.0:
            return target_only(
                proposal.tree,
                logits,
                states,
                accept_threshold_single=single,
                accept_threshold_acc=acc,
            )
        return follow(proposal.tree, logits, states)

    return accept


def make_worker(
    model_config: ModelConfig, drafters: Mapping[str, MakeDrafter], *, num_ids: int | None = None
) -> TpModelWorker | SpecWorker:
    """The worker of this rank, with the published algorithm if there is one.

    `drafters` are those that the algorithms are made by; `num_ids` is how many ids the tokenizer knows, None
    without a tokenizer.
    """
    spec = get_spec()
    name = spec.speculative_algorithm
    if name is None:
        return TpModelWorker(model_config, num_ids=num_ids)
    if name not in drafters or spec.speculative_num_draft_tokens is None:
        raise RuntimeError(
            f"speculative_algorithm is {name!r} with {spec.speculative_num_draft_tokens} draft tokens: "
            f"resolve the arguments first; known algorithms are {', '.join(drafters)}"
        )
    target = TpModelWorker(model_config, num_ids=num_ids, has_draft=True)
    setup = DraftSetup(target, spec.speculative_num_draft_tokens)
    return SpecWorker(target, drafters[name](setup), _published_rule())

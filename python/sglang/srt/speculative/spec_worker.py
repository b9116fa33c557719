"""Owns the round that every draft algorithm runs in: draft, verify, accept, keep, go on.

Built by the registry in place of the plain worker; the scheduler cannot tell the difference, except that a
decode step gives several tokens a request. All target-side work (forward, acceptance, its broadcast) is done
here, outside of every draft scope. It must not know how anything is drafted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner_components.graph_setup import (
    most_recorded_requests,
    published_graph_backend,
)
from sglang.srt.model_executor.result_broadcast import share
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.platforms.device import model_device
from sglang.srt.runtime_context import get_device, get_parallel, get_spec
from sglang.srt.speculative.accept import Accepted, path_logprobs
from sglang.srt.speculative.base_spec_worker import Drafter, Proposal
from sglang.srt.speculative.draft_gate import DraftGate
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import RoundOutcome, keep_accepted, share_tree, verify_batch

logger = logging.getLogger(__name__)

#: (proposal, logits [batch * N, vocab], the requests' states before the round) -> what each request gets.
AcceptRule = Callable[[Proposal, torch.Tensor, Sequence[SamplingState]], list[Accepted]]


class SpecWorker:
    """The target's worker and a drafter, behind the scheduler's interface."""

    def __init__(self, target: TpModelWorker, drafter: Drafter, accept: AcceptRule) -> None:
        self.target = target
        self.drafter = drafter
        self._accept = accept
        self._gate = _published_gate()
        target.make_pools(drafts=drafter.kv_specs, slots_per_step=drafter.slots_per_step)
        if drafter.slots_per_step > target.max_total_num_tokens:
            raise ValueError(
                f"a round of drafts takes up to {drafter.slots_per_step} slots of a request, and the KV pool "
                f"has {target.max_total_num_tokens} tokens: nothing would ever be drafted; lower "
                "--speculative-num-steps, --speculative-eagle-topk or --speculative-num-draft-tokens, or "
                "raise --max-total-tokens or --mem-fraction-static"
            )
        drafter.init_pools(target.pools)
        make_backend = published_graph_backend()
        if make_backend is not None:
            target.record(drafter.verify_shape, captures_hidden=drafter.captures_hidden)
            # Rounds without guesses must be as fast as plain steps.
            plain = ForwardShape(ForwardMode.TARGET_VERIFY, 1)
            target.record(plain, captures_hidden=drafter.captures_hidden)
            table = target.req_to_token_pool
            drafter.init_graphs(make_backend, table, max_requests=most_recorded_requests(table))
        self.model_config = target.model_config
        self.page_size = target.page_size
        self.vocab_size = target.vocab_size
        self.context_len = target.context_len
        self.max_total_num_tokens = target.max_total_num_tokens
        self.req_to_token_pool = target.req_to_token_pool
        self.token_to_kv_pool_allocator = target.token_to_kv_pool_allocator
        self.slots_per_step = drafter.slots_per_step
        self.num_recent_ids = drafter.num_recent_ids

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ForwardBatch) -> GenerationBatchResult:
        """Compute prompts, or run one round for each request of a decode batch."""
        if batch.batch_size == 0:
            if batch.dp_step is not None:
                self._idle(batch.dp_step)
            return GenerationBatchResult([], [])
        if batch.forward_mode is ForwardMode.EXTEND:
            return self._prompts(batch)
        return self._round(batch)

    def _prompts(self, batch: ForwardBatch) -> GenerationBatchResult:
        if self._gate is not None:
            self._gate.interrupt()
        batch.capture_hidden = self.drafter.captures_hidden
        output = self.target.model_runner.forward(batch)
        result = self.target.share_drawn(batch, output)
        result.read()
        follow_on = batch.next_prompt_ids or [None] * batch.batch_size
        # A request that failed, or only wants its prompt computed, has no next token; what its draft makes of
        # it is read by nobody.
        next_ids = [
            drawn[0] if drawn else token_id or 0
            for drawn, token_id in zip(result.next_token_ids, follow_on, strict=True)
        ]
        self.drafter.after_prompts(
            batch, output.hidden, torch.tensor(next_ids, device=batch.input_ids.device)
        )
        return result

    def _round(self, batch: ForwardBatch) -> GenerationBatchResult:
        round = Round.of(batch, self.req_to_token_pool.req_to_token)
        most_nodes = self.drafter.num_nodes(batch.batch_size, _slots(batch, batch.dp_step))
        may_draft = most_nodes > 1 and (self._gate is None or self._gate.drafts(batch.batch_size))
        proposal = self.drafter.propose(round, most_nodes if may_draft else 1)
        tree = share_tree(proposal.tree)
        num_nodes = tree.num_nodes
        verify = verify_batch(round, tree, capture_hidden=self.drafter.captures_hidden)
        output = self.target.model_runner.forward(verify)
        outcome = share(verify, lambda: self._accepted(batch, proposal, output.logits), RoundOutcome)
        verified = keep_accepted(round, tree, outcome.accepted, self.target.pools.kv, output.hidden)
        self.drafter.after_accepted(verified)
        if self._gate is not None:
            if most_nodes == 1:
                self._gate.interrupt()  # there was no room to draft
            elif may_draft and num_nodes == 1:
                self._gate.note_nothing_proposed(outcome.end, batch.batch_size)
            else:
                self._note_round(self._gate, outcome, drafted=may_draft)
        return GenerationBatchResult(
            next_token_ids=[one.token_ids for one in outcome.accepted],
            failures=[one.failure for one in outcome.accepted],
            output_logprobs=outcome.logprobs,
            num_correct_drafts=[one.num_correct_drafts for one in outcome.accepted],
            num_proposed_drafts=num_nodes - 1,
            replayed=self.target.model_runner.replayed,
        )

    @staticmethod
    def _note_round(gate: DraftGate, outcome: RoundOutcome, *, drafted: bool) -> None:
        count = len(outcome.accepted)
        tokens = sum(len(one.token_ids) for one in outcome.accepted) / count
        gate.note_round(outcome.end, count, drafted=drafted, tokens=tokens)

    def _accepted(self, batch: ForwardBatch, proposal: Proposal, logits: torch.Tensor) -> RoundOutcome:
        states = [state for state in batch.sampling_states if state is not None]
        accepted = self._accept(proposal, logits, states)
        logprobs = None
        if batch.logprob_requests is not None:
            logprobs = path_logprobs(logits, accepted, states, batch.logprob_requests)
        return RoundOutcome(accepted, logprobs, time.perf_counter())

    def _idle(self, step: DpStep) -> None:
        """Take part in what the other replicas do: their prompts, or their round."""
        runner, drafter = self.target.model_runner, self.drafter
        if step.is_extend:
            runner.forward(ForwardBatch.idle(step, runner.device))
            drafter.idle_prompts(step)
            return
        num_nodes = drafter.num_nodes(max(step.num_requests), step.slots_per_request)
        drafter.idle_propose(step, num_nodes)
        verify = step.of_phase(rows=num_nodes, logit_rows=num_nodes)
        runner.forward(ForwardBatch.idle(verify, runner.device))
        drafter.idle_accepted(step, num_nodes)


def _published_gate() -> DraftGate | None:
    """What skips drafts that do not pay, unless that is switched off or would change an answer.

    The time of a round is that of a processor that waits for its results, so other devices have none.
    """
    if not envs.SGLANG_SPEC_SKIP_SLOW_DRAFTS.get() or model_device(get_device().device).type != "cpu":
        return None
    spec = get_spec()
    reasons = {
        "replicas would choose differently (--attn-dp-size)": get_parallel().attn_dp_size > 1,
        "--speculative-adaptive chooses the drafts": spec.speculative_adaptive,
        "--speculative-use-rejection-sampling draws by the rounds": spec.speculative_use_rejection_sampling,
    }
    for reason, holds in reasons.items():
        if holds:
            logger.info("Drafts are not left out where they are slow: %s", reason)
            return None
    return DraftGate()


def _slots(batch: ForwardBatch, step: DpStep | None) -> int:
    """Slots that each request has for the nodes of this round; replicas verify equally many nodes."""
    return batch.slots_per_request if step is None else step.slots_per_request

"""Owns what the sampler must know about one sequence: its parameters, its seed and the ids it has produced.

Held by a request for its whole life (also across a retraction), handed to the sampler in every forward
batch. It must not hold tensors: penalties and the random stream are derived from the request's own output
ids, so no batch change can disturb them.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.sampling.sampling_params import SamplingParams


class SamplingState:
    """Per-sequence sampling state.

    `counts` maps each output token id to how often it was produced (frequency, presence and repetition
    penalties look at output tokens only). `num_output` is the position in the random stream: the draw for
    output token i is a pure function of (`seed`, i). `end_ids` are the ids that end the sequence (EOS and
    stop ids; empty of EOS with ignore_eos); they are suppressed until `min_new_tokens` tokens exist.
    """

    __slots__ = ("_has_changes", "counts", "end_ids", "num_output", "params", "seed")

    def __init__(self, params: SamplingParams, seed: int, end_ids: Iterable[int]) -> None:
        self.params = params
        self.seed = seed
        self.end_ids = frozenset(end_ids)
        self.counts: dict[int, int] = {}
        self.num_output = 0
        self._has_changes = bool(params.logit_bias) or params.has_penalties

    def append(self, token_id: int) -> None:
        """Record one produced token."""
        self.counts[token_id] = self.counts.get(token_id, 0) + 1
        self.num_output += 1

    def after(self, token_ids: Iterable[int]) -> SamplingState:
        """The state once `token_ids` are produced as well; this one stays as it is."""
        state = SamplingState(self.params, self.seed, self.end_ids)
        state.counts = dict(self.counts)
        state.num_output = self.num_output
        for token_id in token_ids:
            state.append(token_id)
        return state

    @property
    def suppresses_end(self) -> bool:
        """True while `min_new_tokens` is not reached, so that no end id may be drawn."""
        return self.num_output < self.params.min_new_tokens

    @property
    def changes_logits(self) -> bool:
        """True when a penalty, bias or suppression applies before the draw."""
        return self._has_changes or self.suppresses_end

    @property
    def is_plain_greedy(self) -> bool:
        """True when the draw is the argmax of the raw logits."""
        return self.params.is_greedy and not self.changes_logits

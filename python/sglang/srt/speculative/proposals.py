"""Owns how a draft's proposals are drawn when its distribution is to be compared with the target's.

Read by drafters whose chains are accepted by rejection sampling or block verification. It must not look at
the target: limits, penalties and bias act on the verified distribution alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.kernels.draw_token import Purpose, uniform_rows
from sglang.kernels.token_probs import draw_from, id_bits, kept_probs
from sglang.srt.batch.sampling_state import SamplingState

#: Random numbers set aside for one step: more than an id has bits.
_NUMBERS_PER_STEP = 64


def propose_sampled(
    draft_logits: torch.Tensor, states: Sequence[SamplingState], step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the token of a draft step for each request: token ids [batch], and q [batch, vocab] float64.

    q is the distribution that the token was drawn from: the softmax of draft_logits [batch, vocab] at the
    request's temperature; a greedy request proposes the best token, and its q is 1 there. Acceptance needs
    this very q: hand it on, never compute it again. Ids are the target's: a draft with a vocabulary of its
    own gives minus infinity to tokens that it does not know. A row with NaN or infinity proposes any token.

    `states` are those before the round for every `step` (0 is the token after the root). The random numbers
    belong to the round and the step, not to the token's place in the text: block verification looks at the
    tokens behind a rejected one, so the next round must not draw them with the same numbers.
    """
    usable = torch.isfinite(draft_logits.amax(dim=-1, keepdim=True))
    q = kept_probs(
        torch.where(usable, draft_logits, 0.0),
        temperature=[state.params.temperature for state in states],
        top_k=[1 if state.params.is_greedy else -1 for state in states],
        top_p=[1.0] * len(states),
        min_p=[0.0] * len(states),
    )
    first = step * _NUMBERS_PER_STEP
    u = uniform_rows(
        [state.seed for state in states],
        [state.num_output for state in states],
        Purpose.PROPOSAL,
        range(first, first + id_bits(q.shape[1])),
    )
    return draw_from(q, u.to(q.device)), q

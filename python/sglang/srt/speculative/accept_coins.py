"""Owns the rules of acceptance that toss coins: target-only sampling, rejection sampling, block verification.

Read by the speculative worker where an operator chose one of them; `accept.follow` is served by default. All
of them keep the target's distribution (with the exception that `target_only` names), but not the text that a
seed gives without a draft. They must not look at the draft beyond its tokens and the q handed in with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from sglang.kernels.draw_token import Purpose, uniform_rows
from sglang.kernels.token_probs import draw_from, id_bits, kept_probs
from sglang.srt.batch.forward_batch import ROW_FAILURES
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.sampler import prepare_rows
from sglang.srt.speculative.accept import (
    Accepted,
    NodeMask,
    Walk,
    mask_of_rows,
    start_walks,
    walk_levels,
)


def target_only(
    tree: DraftTree,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    mask: NodeMask | None = None,
    *,
    accept_threshold_single: float = 1.0,
    accept_threshold_acc: float = 1.0,
) -> list[Accepted]:
    """Accept a child with its target probability, or by less than chance where a threshold says so.

    At each visited node a coin u in [0, 1) is laid on the cumulated probabilities of the children, in the
    order of the tree: the first child with p > 0 and u < acc is accepted, where acc is the sum so far. If
    there is none, the token is drawn from p without these children. That is the inverse CDF of p with the
    children listed first, so it is lossless for any tree that does not depend on the coins.

    A threshold below 1 makes it lossy: a child is also accepted when its p reaches `accept_threshold_single`,
    and when u < acc / `accept_threshold_acc`. The text then leans towards the draft. Arguments and result are
    those of `accept.follow`.
    """

    def draw(logits: torch.Tensor, places: list[int], walks: list[Walk]) -> tuple[list[int], list[int]]:
        rows = logits[torch.tensor(places, device=logits.device)]
        walk_states = [walk.state for walk in walks]
        failures = prepare_rows(rows, walk_states, mask_of_rows(mask, walks))
        probs = target_probs(rows, walk_states)
        tried = [(i, token_id) for i, walk in enumerate(walks) for token_id in walk.candidates()]
        at = torch.tensor(tried, dtype=torch.int64, device=rows.device).reshape(-1, 2).unbind(dim=1)
        token_ids = _draw_remainder(probs.index_put(at, probs.new_zeros(())), probs, walk_states)
        coins = _numbers(walk_states, Purpose.ACCEPTANCE, 1)[:, 0].tolist()
        acc, accepted = [0.0] * len(walks), [False] * len(walks)
        for (i, token_id), p in zip(tried, probs[at].tolist(), strict=True):
            acc[i] += p
            wins = coins[i] * accept_threshold_acc < acc[i] or p >= accept_threshold_single
            if p > 0 and wins and not accepted[i]:
                token_ids[i], accepted[i] = token_id, True
        return token_ids, failures.tolist()

    walks = start_walks(tree, states)
    walk_levels(walks, logits, tree.num_nodes, draw)
    return [walk.result() for walk in walks]


def rejection(
    chain: DraftTree,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    q: torch.Tensor,
    mask: NodeMask | None = None,
) -> list[Accepted]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), lossless.

    Draft token x is accepted when u * q(x) < p(x) with a coin u in [0, 1). Behind the first rejection the
    bonus is drawn from max(p - q, 0), and from p where none is rejected.

    `chain` has N nodes, and q [batch, N - 1, vocab] holds the distribution that each proposal was drawn from
    (`proposals.propose_sampled`); a value that is no probability (NaN, infinite, negative) counts as 0. Other
    arguments and the result are those of `accept.follow`. Nodes behind the first failed row do not count.
    """
    return _accept_chain(rejection_rule, chain, logits, states, q, mask)


def block_verification(
    chain: DraftTree,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    q: torch.Tensor,
    mask: NodeMask | None = None,
) -> list[Accepted]:
    """Block verification (Sun et al., arXiv 2403.10444): lossless, and accepts at least as many tokens.

    With r_0 = 1 and r_i = min(r_{i-1} * p_i(x_i) / q_i(x_i), 1), prefixes of the S proposals are tried from
    the longest down. Prefix S is accepted with probability r_S, prefix i < S with m / (m + 1 - r_i), where m
    is the sum of max(r_i * p_{i+1} - q_{i+1}, 0); the bonus is then drawn from these summands.

    Arguments and result are those of `rejection`.
    """
    return _accept_chain(block_rule, chain, logits, states, q, mask)


#: Decides chains from proposals [batch, S], p and q [batch, S + 1, vocab] (q is 0 in its last row), coins
#: [batch, S] and how many proposals of each request may be accepted, limit [batch]. Gives how many are,
#: [batch], and the weights [batch, vocab] that the bonus is drawn from.
ChainRule = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]


def rejection_rule(
    proposals: torch.Tensor, p: torch.Tensor, q: torch.Tensor, coins: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decisions of `rejection`, as a `ChainRule`."""
    own_p, own_q = _of_proposals(p, proposals), _of_proposals(q, proposals)
    accepted = coins * own_q < own_p
    accepted &= torch.arange(proposals.shape[1], device=p.device) < limit[:, None]
    count = accepted.long().cumprod(dim=1).sum(dim=1)
    each = torch.arange(len(count), device=p.device)
    return count, _remainder(p[each, count], q[each, count])


def block_rule(
    proposals: torch.Tensor, p: torch.Tensor, q: torch.Tensor, coins: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decisions of `block_verification`, as a `ChainRule`."""
    own_p, own_q = _of_proposals(p, proposals), _of_proposals(q, proposals)
    count = torch.zeros_like(limit)
    weights = _remainder(p[:, 0], q[:, 0])
    r = torch.ones_like(p[:, 0, 0])
    for i in range(1, proposals.shape[1] + 1):
        mass = r * own_p[:, i - 1]
        # A proposal that q says is impossible is as good as certain, if the target has it at all.
        r = torch.where(own_q[:, i - 1] > 0, mass / own_q[:, i - 1], mass.sign()).clamp_(max=1.0)
        remainder = _remainder(r[:, None] * p[:, i], q[:, i])
        m = remainder.sum(dim=-1)
        chance = torch.where((i == limit) | (r >= 1.0), r, m / (m + 1.0 - r))
        # A longer prefix that is accepted replaces a shorter one, so the order of the coins does not matter.
        accepted = (coins[:, i - 1] < chance) & (i <= limit)
        count = torch.where(accepted, i, count)
        weights = torch.where(accepted[:, None], remainder, weights)
    return count, weights


def target_probs(rows: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """What prepared logits [rows, vocab] are drawn from, [rows, vocab] float64: one-hot for greedy rows."""
    params = [state.params for state in states]
    return kept_probs(
        rows,
        temperature=[p.temperature for p in params],
        top_k=[1 if p.is_greedy else p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )


def _accept_chain(
    rule: ChainRule,
    chain: DraftTree,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    q: torch.Tensor,
    mask: NodeMask | None,
) -> list[Accepted]:
    assert chain.is_chain  # a distribution q belongs to one proposal a step
    batch, num_nodes = chain.token_ids.shape
    chains = chain.token_ids.tolist()
    nodes = [(b, i) for b in range(batch) for i in range(num_nodes)]
    node_states = [states[b].after(chains[b][1 : i + 1]) for b, i in nodes]
    rows = logits.clone()
    row_mask = None if mask is None else partial(mask, nodes)
    failed = prepare_rows(rows, node_states, row_mask).reshape(batch, num_nodes)
    p = target_probs(rows, node_states).reshape(batch, num_nodes, -1)
    first_failed = torch.where(failed.any(dim=1), (failed != 0).long().argmax(dim=1), num_nodes)
    limit = first_failed.clamp(max=num_nodes - 1)
    count, bonus = decide_chain(rule, chain.token_ids[:, 1:], p, q, limit, states)
    results = []
    for b, (c, reasons) in enumerate(zip(count.tolist(), failed.tolist(), strict=True)):
        failure = ROW_FAILURES[reasons[c]]
        last = [] if failure is not None else [bonus[b]]
        results.append(Accepted(list(range(c + len(last))), chains[b][1 : c + 1] + last, failure))
    return results


def decide_chain(
    rule: ChainRule,
    proposals: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    limit: torch.Tensor,
    states: Sequence[SamplingState],
) -> tuple[torch.Tensor, list[int]]:
    """Toss the coins of chains: how many proposals [batch, S] are accepted, [batch], and each bonus.

    p [batch, S + 1, vocab], q [batch, S, vocab], limit as in `ChainRule`. The bonus behind as many proposals
    as a limit below S allows means nothing.
    """
    q = torch.where(torch.isfinite(q) & (q > 0), q, 0.0).double()
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))
    # One number a node and round; see `proposals.propose_sampled` for why they do not belong to places.
    coins = _numbers(states, Purpose.ACCEPTANCE, proposals.shape[1]).to(p.device)
    count, weights = rule(proposals, p, q, coins, limit)
    return count, _draw_remainder(weights, p[torch.arange(len(count), device=p.device), count], states)


def _of_proposals(probs: torch.Tensor, proposals: torch.Tensor) -> torch.Tensor:
    """The probability [batch, S] of each proposal in the rows [batch, S + 1, vocab]."""
    return probs[:, :-1].gather(2, proposals[:, :, None])[:, :, 0]


def _remainder(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the draft proposes too rarely, [batch, vocab]: accepted proposals and this together make p."""
    return (p - q).clamp_(min=0.0)


def _numbers(states: Sequence[SamplingState], purpose: Purpose, count: int) -> torch.Tensor:
    seeds, positions = [state.seed for state in states], [state.num_output for state in states]
    return uniform_rows(seeds, positions, purpose, range(count))


def _draw_remainder(weights: torch.Tensor, probs: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw from weights [rows, vocab]; from probs where rounding has left a row of them without any."""
    empty = weights.sum(dim=-1, keepdim=True) <= 0
    u = _numbers(states, Purpose.REMAINDER, id_bits(weights.shape[1]))
    return draw_from(torch.where(empty, probs, weights), u.to(weights.device)).tolist()

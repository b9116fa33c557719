from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="unit-cpu")

import inspect
import math
import types

import pytest
import torch

from sglang.kernels.draw_token import Purpose, uniform_rows
from sglang.kernels.token_probs import kept_probs
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import accept, accept_coins, proposals

VOCAB, ROOT, DRAWS = 5, 2, 60_000
#: Enough to see a mistake that is planted.
FEW = 15_000
RULES = ["rejection_rule", "block_rule"]

#: The tiny model: what it makes of a token, whatever stood before. Row 2 follows the root.
TARGET = torch.tensor(
    [
        [0.30, 0.05, 0.25, 0.15, 0.25],
        [0.10, 0.10, 0.55, 0.20, 0.05],
        [0.40, 0.25, 0.15, 0.12, 0.08],
        [0.05, 0.35, 0.05, 0.25, 0.30],
        [0.22, 0.18, 0.20, 0.28, 0.12],
    ],
    dtype=torch.float64,
)
#: What drafts make of a token. The last two never propose what the target likes best.
DRAFTS = {
    "good": 0.8 * TARGET + 0.2 / VOCAB,
    "bad": TARGET.flip(1) ** 2 / (TARGET**2).sum(dim=1, keepdim=True),
    "zero where p is large": (1 - torch.eye(VOCAB).double()[TARGET.argmax(dim=1)]) / (VOCAB - 1),
    "one-hot": torch.eye(VOCAB).double()[TARGET.argmin(dim=1)],
}
#: By place in the text: the state of each request.
STATES = [
    [SamplingState(SamplingParams(), seed, []).after([0] * place) for seed in range(DRAWS)]
    for place in range(2)
]


def law_of(target):
    """The law of the first two tokens, [VOCAB, VOCAB]."""
    return target[ROOT][:, None] * target


def bound(freedom):
    """The 0.999 quantile of chi-square (Wilson and Hilferty): 51.2 for 24 degrees of freedom."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def deviation(text, law):
    """Pearson's statistic of text [draws, 2] against the law, over its bound: above 1 it is another law."""
    counts = torch.bincount(text[:, 0] * len(law) + text[:, 1], minlength=law.numel())
    expected = law.flatten() * len(text)
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(statistic) / bound(int(possible.sum()) - 1)


def with_second_token(play, draws=DRAWS):
    """The first two tokens of every request [draws, 2]; play(roots, requests, place) is one round of some.

    It gives the tokens [requests, at least 2] and how many of them count.
    """
    text, lengths = play(torch.full((draws,), ROOT), range(draws), 0)
    text = text[:, :2]
    short = (lengths == 1).nonzero()[:, 0]
    if len(short):
        text[short, 1] = play(text[short, 0], short.tolist(), 1)[0][:, 0]
    return text


def chains(rule, draft, target=TARGET, *, draws=DRAWS, rules=accept_coins, propose=proposals.propose_sampled):
    """Two tokens out of rounds of two proposals."""

    def play(roots, requests, place):
        states = [STATES[place][b] for b in requests]
        first, q_first = propose(draft[roots].log(), states, 0)
        second, q_second = propose(draft[first].log(), states, 1)
        drafted = torch.stack([first, second], dim=1)
        p = target[torch.stack([roots, first, second], dim=1)]
        count, bonus = rules.decide_chain(
            getattr(rules, rule),
            drafted,
            p,
            torch.stack([q_first, q_second], dim=1),
            torch.full_like(roots, 2),
            states,
        )
        text = torch.nn.functional.pad(drafted, (0, 1))
        return text.scatter_(1, count[:, None], torch.tensor(bonus)[:, None]), count + 1

    return with_second_token(play, draws)


def planted(module, old="", new="", **names):
    """A copy of the module with one place of its source changed, or with other things under some names."""
    source = inspect.getsource(module)
    if old:
        assert source.count(old) == 1
        source = source.replace(old, new)
    copy = types.ModuleType("planted")
    exec(compile(source, "planted", "exec"), copy.__dict__)
    copy.__dict__.update(names)
    return copy


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_first_two_tokens_follow_the_target_whatever_the_draft_proposes(rule, draft):
    assert 0 < deviation(chains(rule, DRAFTS[draft]), law_of(TARGET)) < 1


LIMITS = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.85, "min_p": 0.1},
}


def limited(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return kept_probs(TARGET.log(), **{name: [value] * VOCAB for name, value in given.items()})


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("rule", RULES)
def test_limits_act_on_the_verified_distribution(rule, limits):
    """The draft knows none of them, so it proposes tokens that must never come out."""
    target = limited(**LIMITS[limits])
    assert 0 < deviation(chains(rule, DRAFTS["good"], target), law_of(target)) < 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "draw_from(torch.where(empty, probs, weights), u.to(weights.device))",
            "(u[:, :1] > weights.cumsum(-1)[:, :-1]).sum(dim=-1)",
        ),
        ("return (p - q).clamp_(min=0.0)", "return p"),
    ],
    ids=["the remainder is not renormalised", "the bonus behind a rejection is drawn from p"],
)
def test_a_wrong_bonus_would_be_seen(rule, old, new):
    rules = planted(accept_coins, old, new)
    assert deviation(chains(rule, DRAFTS["bad"], draws=FEW, rules=rules), law_of(TARGET)) > 1


@pytest.mark.parametrize("purpose", [Purpose.ACCEPTANCE, Purpose.REMAINDER])
@pytest.mark.parametrize("rule", RULES)
def test_coins_from_the_stream_of_the_proposals_would_be_seen(rule, purpose):
    def correlated(seeds, positions, asked, numbers):
        return uniform_rows(seeds, positions, Purpose.PROPOSAL if asked is purpose else asked, numbers)

    rules = planted(accept_coins, uniform_rows=correlated)
    assert deviation(chains(rule, DRAFTS["bad"], draws=FEW, rules=rules), law_of(TARGET)) > 1


#: In eighths, and the draft proposes impossible tokens: with coins in eighths too, u * q = p happens.
EIGHTHS = torch.tensor([[4, 0, 2, 2, 0]] * VOCAB, dtype=torch.float64) / 8
COARSE_DRAFT = torch.tensor([[2, 2, 2, 1, 1]] * VOCAB, dtype=torch.float64) / 8


def in_eighths(seeds, positions, purpose, numbers):
    coins = uniform_rows(seeds, positions, purpose, numbers)
    return (coins * 8).floor() / 8 if purpose is Purpose.ACCEPTANCE else coins


def test_an_impossible_token_is_not_accepted_by_a_coin_of_zero():
    strict = planted(accept_coins, uniform_rows=in_eighths)
    assert deviation(chains("rejection_rule", COARSE_DRAFT, EIGHTHS, rules=strict), law_of(EIGHTHS)) < 1


def test_a_comparison_that_is_not_strict_would_be_seen():
    loose = planted(accept_coins, "coins * own_q < own_p", "coins * own_q <= own_p", uniform_rows=in_eighths)
    assert (
        deviation(chains("rejection_rule", COARSE_DRAFT, EIGHTHS, draws=FEW, rules=loose), law_of(EIGHTHS))
        > 1
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_q_that_the_proposals_were_not_drawn_from_would_be_seen(rule):
    """O17: proposals at another temperature than the one that acceptance believes."""

    def misstated(draft_logits, states, step):
        token_ids, _ = proposals.propose_sampled(draft_logits, states, step)
        return token_ids, torch.softmax(draft_logits / 0.7, dim=-1)

    text = chains(rule, DRAFTS["good"], draws=FEW, propose=misstated)
    assert deviation(text, law_of(TARGET)) > 1


#: The draft halves its bets, and the second proposal alone decides whether the first is accepted with it.
HASTY_DRAFT = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * VOCAB, dtype=torch.float64)
PICKY = torch.tensor([[0.9, 0.025, 0.025, 0.025, 0.025]] * 2 + [[0.2] * VOCAB] * 3, dtype=torch.float64)


def by_place(draft_logits, states, step):
    """Proposals whose numbers belong to places in the text instead of rounds."""
    return proposals.propose_sampled(draft_logits, [state.after([0] * step) for state in states], 0)


def test_a_proposal_drawn_again_with_the_same_numbers_would_be_seen():
    """Block verification rejects a token for those behind it, which tells something about their numbers."""
    assert deviation(chains("block_rule", HASTY_DRAFT, PICKY), law_of(PICKY)) < 1
    assert deviation(chains("block_rule", HASTY_DRAFT, PICKY, draws=FEW, propose=by_place), law_of(PICKY)) > 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_step_of_rejection_accepts_as_often_as_both_distributions_agree(draft):
    states, q = STATES[0], DRAFTS[draft][ROOT].expand(DRAWS, VOCAB)
    token_ids, q = proposals.propose_sampled(q.log(), states, 0)
    p = TARGET[torch.stack([torch.full_like(token_ids, ROOT), token_ids], dim=1)]
    count, _ = accept_coins.decide_chain(
        accept_coins.rejection_rule, token_ids[:, None], p, q[:, None], torch.ones_like(token_ids), states
    )
    expected = float(torch.minimum(TARGET[ROOT], DRAFTS[draft][ROOT]).sum())
    sigma = math.sqrt(expected * (1 - expected) / DRAWS)
    assert abs(float(count.double().mean()) - expected) < 3 * sigma


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_equals_the_target_is_always_accepted(rule):
    seen = []

    class Rules:
        rejection_rule, block_rule = accept_coins.rejection_rule, accept_coins.block_rule

        @staticmethod
        def decide_chain(*given):
            count, bonus = accept_coins.decide_chain(*given)
            seen.append(count)
            return count, bonus

    # q goes through a logarithm in the draft; the target takes the same way, so both are the same floats.
    target = torch.softmax(TARGET.log(), dim=-1)
    assert deviation(chains(rule, TARGET, target, rules=Rules), law_of(TARGET)) < 1
    assert bool((seen[0] == 2).all()) and len(seen) == 1


def test_block_verification_accepts_more_than_rejection_sampling():
    accepted = {}
    for rule in RULES:
        roots = torch.full((DRAWS,), ROOT)
        first, q_first = proposals.propose_sampled(DRAFTS["bad"][roots].log(), STATES[0], 0)
        second, q_second = proposals.propose_sampled(DRAFTS["bad"][first].log(), STATES[0], 1)
        count, _ = accept_coins.decide_chain(
            getattr(accept_coins, rule),
            torch.stack([first, second], dim=1),
            TARGET[torch.stack([roots, first, second], dim=1)],
            torch.stack([q_first, q_second], dim=1),
            torch.full_like(roots, 2),
            STATES[0],
        )
        accepted[rule] = float(count.double().mean())
    assert accepted["block_rule"] > accepted["rejection_rule"] + 0.01


#: The children of each token, best first for the target: what a tree proposes after it.
ORDER = TARGET.argsort(dim=1, descending=True)
TREES = {
    "good": ORDER[:, :2],
    "bad": ORDER[:, 3:],
    "the best is missing, one is there twice": ORDER[:, [4, 1, 4]],
}


def trees(rule, children, draws=DRAWS, **thresholds):
    """Two tokens out of rounds with trees of two levels: children [VOCAB, width] of every token."""
    width = children.shape[1]
    parents = torch.tensor([-1] + [0] * width + [1 + i for i in range(width) for _ in range(width)])

    def play(roots, requests, place):
        first = children[roots]
        token_ids = torch.cat([roots[:, None], first, children[first].flatten(1)], dim=1)
        tree = DraftTree(token_ids, parents.expand_as(token_ids))
        logits = TARGET.log().float()[token_ids.flatten()]
        accepted = rule(tree, logits, [STATES[place][b] for b in requests], **thresholds)
        lengths = torch.tensor([len(result.token_ids) for result in accepted])
        return torch.tensor([(result.token_ids * 2)[:2] for result in accepted]), lengths

    return with_second_token(play, draws)


@pytest.mark.parametrize("tree", TREES)
def test_target_only_sampling_follows_the_target_whatever_the_tree_holds(tree):
    assert 0 < deviation(trees(accept_coins.target_only, TREES[tree]), law_of(TARGET)) < 1


def test_draw_and_follow_follows_the_target():
    """That it draws what plain decoding draws is shown in test_accept.py; here the numbers are shown too."""
    assert 0 < deviation(trees(accept.follow, TREES["good"]), law_of(TARGET)) < 1


def test_children_that_were_rejected_and_stay_in_the_remainder_would_be_seen():
    rules = planted(accept_coins, "probs.index_put(at, probs.new_zeros(()))", "probs")
    assert deviation(trees(rules.target_only, TREES["good"], FEW), law_of(TARGET)) > 1


@pytest.mark.parametrize("threshold", ["accept_threshold_single", "accept_threshold_acc"])
def test_a_threshold_below_one_leans_towards_the_draft(threshold):
    text = trees(accept_coins.target_only, TREES["good"], FEW, **{threshold: 0.35})
    assert deviation(text, law_of(TARGET)) > 1
    proposed = (text[:, :1] == TREES["good"][ROOT]).any(dim=1).double().mean()
    assert float(proposed) > float(TARGET[ROOT, TREES["good"][ROOT]].sum()) + 0.02

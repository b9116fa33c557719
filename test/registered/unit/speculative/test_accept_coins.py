from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import math

import pytest
import torch

from sglang.kernels.draw_token import Purpose, uniform_rows
from sglang.kernels.token_probs import draw_from, id_bits
from sglang.srt.batch.forward_batch import NOT_FINITE, NOTHING_LEFT
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.sampler import Sampler, prepare_rows
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import accept_coins
from sglang.srt.speculative.accept import Accepted, follow, path_logprobs
from sglang.srt.speculative.proposals import propose_sampled

VOCAB = 8
GREEDY = {"temperature": 0.0}
#: O17: the same logits wherever one stands, for the target and for a draft that leans elsewhere.
TARGET = torch.tensor([1.2, 0.1, -0.4, 0.8, -2.0, 0.5, 0.0, -0.9])
DRAFT = torch.tensor([0.2, 1.0, -0.1, 1.1, -0.5, -1.0, 0.4, 0.0])


def state_of(seed=0, produced=(), end_ids=(), **params):
    return SamplingState(SamplingParams(**params), seed, end_ids).after(produced)


def proposed(states, roots, steps, draft=DRAFT):
    """Chains of so many proposals, and the q of each."""
    drawn = [propose_sampled(draft.expand(len(states), -1), states, step) for step in range(steps)]
    chain = DraftTree.chain(torch.stack([torch.tensor(roots), *(ids for ids, _ in drawn)], dim=1))
    return chain, torch.stack([q for _, q in drawn], dim=1)


def rejection(chain, logits, states, q, mask=None):
    return accept_coins.rejection(chain, logits, states, q, mask)


def block_verification(chain, logits, states, q, mask=None):
    return accept_coins.block_verification(chain, logits, states, q, mask)


def target_only(chain, logits, states, q, mask=None):
    return accept_coins.target_only(chain, logits, states, mask)


def draw_and_follow(chain, logits, states, q, mask=None):
    return follow(chain, logits, states, mask)


COINS = [rejection, block_verification, target_only]
RULES = [draw_and_follow, *COINS]


def bound(freedom):
    """The 0.999 quantile of chi-square (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def pairs(rule, seeds, params):
    """How often each pair of first tokens comes, [VOCAB, VOCAB]; without a rule from plain decoding."""
    states, texts = [state_of(seed, **params) for seed in seeds], [[] for _ in seeds]
    while under_way := [b for b, text in enumerate(texts) if len(text) < 2]:
        now = [states[b].after(texts[b]) for b in under_way]
        if rule is None:
            drawn = Sampler()(TARGET.repeat(len(now), 1), now).token_ids.tolist()
            got = [[token_id] for token_id in drawn]
        else:
            chain, q = proposed(now, [(texts[b] or [0])[-1] for b in under_way], 2)
            accepted = rule(chain, TARGET.expand(len(now) * 3, -1), now, q)
            got = [result.token_ids for result in accepted]
        for b, token_ids in zip(under_way, got, strict=True):
            texts[b] = (texts[b] + token_ids)[:2]
    text = torch.tensor(texts)
    return torch.bincount(text[:, 0] * VOCAB + text[:, 1], minlength=VOCAB**2).double().reshape(VOCAB, VOCAB)


def law(params):
    """The law of two tokens of plain decoding, [VOCAB, VOCAB], from the rows that it draws from."""
    states = [state_of(0, **params), *(state_of(0, [token_id], **params) for token_id in range(VOCAB))]
    rows = TARGET.repeat(VOCAB + 1, 1)
    prepare_rows(rows, states)
    probs = accept_coins.target_probs(rows, states)
    return probs[0][:, None] * probs[1:]


SETTINGS = {
    "temperature 1": {},
    "top-p 0.7": {"top_p": 0.7},
    "repetition penalty": {"repetition_penalty": 2.0, "temperature": 0.8},
}
DRAWS = 20_000


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", [None, *COINS])
def test_pairs_of_tokens_follow_the_law_of_plain_decoding(rule, setting):
    """O17, each rule and plain decoding itself against the exact law; draw and follow is plain decoding."""
    counts, expected = pairs(rule, range(DRAWS), SETTINGS[setting]), law(SETTINGS[setting]) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert 0 < statistic < bound(int(possible.sum()) - 1)


def test_draw_and_follow_gives_the_pairs_of_plain_decoding_themselves():
    params = SETTINGS["repetition penalty"]
    assert torch.equal(pairs(draw_and_follow, range(2000), params), pairs(None, range(2000), params))


@pytest.mark.parametrize("rule", [rejection, block_verification])
def test_penalties_that_stand_still_during_a_round_would_be_seen(rule, monkeypatch):
    """Twin: one set of penalties for all rows of a round bends the law."""
    params = SETTINGS["repetition penalty"]
    prepare = accept_coins.prepare_rows

    def frozen(rows, states, mask=None):
        return prepare(rows, [states[i - i % 3] for i in range(len(states))], mask)

    monkeypatch.setattr(accept_coins, "prepare_rows", frozen)
    counts, expected = pairs(rule, range(DRAWS), params), law(params) * DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) > bound(VOCAB**2 - 1)


@pytest.mark.parametrize("rule", COINS)
@pytest.mark.parametrize("greedy", [GREEDY, {"top_k": 1}, {"presence_penalty": 0.7, **GREEDY}])
def test_greedy_requests_among_sampled_ones_get_what_plain_greedy_decoding_gives(rule, greedy):
    generator = torch.Generator().manual_seed(4)
    for seed in range(40):
        states = [state_of(seed, [1], **(greedy if b % 2 else {})) for b in range(4)]
        logits = torch.randn(16, VOCAB, generator=generator).mul_(4).round().div_(4)
        chain, q = proposed(states, [1] * 4, 3, logits[1::4].mean(dim=0))
        mine, plain = rule(chain, logits, states, q), follow(chain, logits, states)
        assert mine[1::2] == plain[1::2]


@pytest.mark.parametrize("rule", RULES)
def test_a_temperature_near_zero_gives_what_greedy_decoding_gives(rule):
    logits = torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(6))
    cold = [state_of(seed, temperature=1e-5) for seed in range(100)]
    chain, q = proposed(cold, [1] * 100, 3, logits[7])
    assert rule(chain, logits, cold, q) == follow(chain, logits, [state_of(**GREEDY)] * 100)


@pytest.mark.parametrize("rule", COINS)
def test_a_request_gets_the_same_whatever_its_neighbours_are(rule):
    generator = torch.Generator().manual_seed(5)
    states = [state_of(b, [1], presence_penalty=0.3 * b, top_p=1.0 - 0.1 * b) for b in range(5)]
    logits = torch.randn(20, VOCAB, generator=generator)
    chain, q = proposed(states, [1] * 5, 3)
    together = rule(chain, logits, states, q)
    assert together == rule(chain, logits, states, q)
    for b in range(5):
        alone = DraftTree.chain(chain.token_ids[b : b + 1])
        assert rule(alone, logits[4 * b : 4 * b + 4], [states[b]], q[b : b + 1]) == [together[b]]


@pytest.mark.parametrize("rule", COINS)
def test_a_broken_row_ends_a_request_that_visits_it_and_no_other(rule):
    """Also block verification, whose decisions look ahead, never takes a number from behind the row."""
    states = [state_of(seed) for seed in range(400)]
    chain, q = proposed(states, [0] * 400, 3, TARGET * 2)
    logits = TARGET.repeat(1600, 1)
    healthy = rule(chain, logits, states, q)
    logits[2::8, 3] = math.nan  # node 2 of every other request
    logits[3::8] = math.nan
    results = rule(chain, logits, states, q)
    assert results[1::2] == healthy[1::2]
    ended = [result for result in results if result.failure is not None]
    assert 10 < len(ended) < 200
    for b, result in enumerate(results[::2]):
        if result.failure is None:
            assert result.num_correct_drafts < 2
            assert result.path == list(range(len(result.token_ids)))
        else:
            assert result == Accepted([0, 1], chain.token_ids[2 * b, 1:3].tolist(), NOT_FINITE)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_with_nothing_left_has_its_own_reason(rule):
    states = [state_of(3, min_new_tokens=2, end_ids=range(VOCAB)), state_of(4)]
    chain, q = proposed(states, [0, 0], 2)
    ended, other = rule(chain, TARGET.repeat(6, 1), states, q)
    assert ended == Accepted([], [], NOTHING_LEFT)
    assert other.failure is None


@pytest.mark.parametrize("rule", RULES)
def test_a_mask_and_suppressed_ends_act_on_the_verified_distribution(rule):
    """The draft likes what is not allowed; nothing of it comes out."""
    states = [state_of(seed, min_new_tokens=2, end_ids=[3]) for seed in range(1000)]
    chain, q = proposed(states, [0] * 1000, 3, TARGET)

    def no_one_behind_a_root(nodes, rows):
        rows[torch.tensor([node == 0 for _, node in nodes]), 1] = -math.inf

    accepted = rule(chain, TARGET.expand(4000, -1), states, q, no_one_behind_a_root)
    assert all(result.failure is None and result.token_ids[0] != 1 for result in accepted)
    assert all(3 not in result.token_ids[:2] for result in accepted)
    assert any(1 in result.token_ids[1:] for result in accepted)
    assert any(3 in result.token_ids[2:] for result in accepted)


@pytest.mark.parametrize("rule", [rejection, block_verification])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.5])
def test_a_q_that_is_no_probability_counts_as_zero(rule, bad):
    states = [state_of(seed) for seed in range(50)]
    chain, q = proposed(states, [0] * 50, 2)
    broken, zero = q.clone(), q.clone()
    broken[:, 0, ::2], zero[:, 0, ::2] = bad, 0.0
    logits = TARGET.expand(150, -1)
    assert rule(chain, logits, states, broken) == rule(chain, logits, states, zero)


@pytest.mark.parametrize("rule", ["rejection_rule", "block_rule"])
def test_the_edges_of_a_coin(rule):
    """0 accepts what is possible at all, the largest below 1 accepts p = q; an empty remainder means p."""
    p = torch.tensor([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]] * 3, dtype=torch.float64)
    q = torch.nn.functional.pad(p[:, :1], (0, 0, 0, 1))
    q[0, 0] = torch.tensor([1.0, 0.0, 0.0])
    proposals = torch.tensor([[0], [1], [1]])
    coins = torch.tensor([[0.0], [0.0], [1.0 - 2**-53]], dtype=torch.float64)
    count, weights = getattr(accept_coins, rule)(proposals, p, q, coins, torch.ones(3, dtype=torch.int64))
    assert count.tolist() == [0, 1, 1]
    assert weights[0].tolist() == [0.0, 0.5, 0.5]
    stopped, weights = getattr(accept_coins, rule)(proposals, p, q, coins, torch.zeros(3, dtype=torch.int64))
    assert stopped.tolist() == [0, 0, 0] and weights[1].sum() == 0
    states = [state_of(seed) for seed in range(3)]
    bonus = accept_coins._draw_remainder(weights, p[:, 0], states)
    u = uniform_rows(range(3), [0] * 3, Purpose.REMAINDER, range(id_bits(3)))
    assert bonus[1:] == draw_from(p[1:, 0], u[1:]).tolist()


@pytest.mark.parametrize("rule", RULES)
def test_log_probabilities_of_accepted_tokens_are_those_of_the_rows_that_gave_them(rule):
    states = [state_of(seed, [1], temperature=0.7, presence_penalty=0.9) for seed in range(300)]
    chain, q = proposed(states, [1] * 300, 3, TARGET)
    logits = TARGET.repeat(1200, 1)
    accepted = rule(chain, logits, states, q)
    asked = LogprobRequest(top_num=2, token_ids=[4])
    entries = path_logprobs(logits, accepted, states, [asked] * 300)
    assert any(result.num_correct_drafts >= 2 for result in accepted)
    for result, state, of_request in zip(accepted, states, entries, strict=True):
        assert [entry.token_id for entry in of_request] == result.token_ids
        for j, entry in enumerate(of_request):
            now = state.after(result.token_ids[:j])
            row = TARGET.clone()
            row[list(now.counts)] -= 0.9
            expected = torch.log_softmax(row / 0.7, dim=-1)
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-6)


def test_proposals_are_drawn_from_the_q_that_is_handed_on():
    states = [state_of(seed, temperature=0.5, top_k=2) for seed in range(4000)]
    token_ids, q = propose_sampled(DRAFT.expand(4000, -1), states, 1)
    assert torch.allclose(q, torch.softmax(DRAFT.double() / 0.5, dim=-1).expand_as(q))
    share = torch.bincount(token_ids, minlength=VOCAB) / 4000
    assert float((share - q[0]).abs().max()) < 0.03
    again, _ = propose_sampled(DRAFT.expand(4000, -1), states, 2)
    assert float((again == token_ids).double().mean()) < 0.5  # a step has numbers of its own


def test_proposals_of_greedy_requests_and_of_broken_rows():
    """A draft that breaks makes nobody fail: its proposal is verified like any other."""
    rows = DRAFT.repeat(4, 1)
    rows[1, 2], rows[2, 2], rows[3] = math.nan, math.inf, -math.inf
    token_ids, q = propose_sampled(rows, [state_of(1, **GREEDY), *(state_of(seed) for seed in range(3))], 0)
    assert int(token_ids[0]) == int(DRAFT.argmax())
    assert q[0].tolist() == [float(i == token_ids[0]) for i in range(VOCAB)]
    assert q[1:].eq(1 / VOCAB).all()
    unknown = torch.full((1, VOCAB), -math.inf)
    unknown[0, 6] = -3.0  # a draft with a vocabulary of its own
    assert propose_sampled(unknown, [state_of(9)], 0)[0].tolist() == [6]

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.batch.forward_batch import NOT_FINITE, NOTHING_LEFT, ROW_FAILURES
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.accept import Accepted, Walk, follow, path_logprobs

VOCAB = 12
GREEDY = {"temperature": 0.0}


def row_of(context, spread=2.0):
    """The toy model: logits [VOCAB] that depend on the whole text, rounded so that some are equal."""
    seed = hash(tuple(context)) & 0x7FFFFFFF
    return (torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread * 4).round() / 4


def state_of(seed=0, produced=(), end_ids=(), **params):
    return SamplingState(SamplingParams(**params), seed, end_ids).after(produced)


def decode(state, context, steps, request=None):
    """Plain decoding: ids, log-probabilities, failure."""
    state, context, ids, entries = state.after(()), list(context), [], []
    for _ in range(steps):
        drawn = Sampler()(row_of(context)[None], [state], [request])
        failure = ROW_FAILURES[int(drawn.failures[0])]
        if failure is not None:
            return ids, entries, failure
        token_id = int(drawn.token_ids[0])
        ids.append(token_id)
        entries += drawn.logprobs
        state.append(token_id)
        context.append(token_id)
    return ids, entries, None


def tree_of(tokens, parents):
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


def verify(tree, contexts):
    """The target's logits of every node, [batch * N, VOCAB]: each sees its context and its ancestors."""
    rows = []
    for b, context in enumerate(contexts):
        texts = []
        for token_id, parent in zip(tree.token_ids[b].tolist(), tree.parents[b].tolist(), strict=True):
            texts.append([*(texts[parent] if parent >= 0 else context), token_id])
            rows.append(row_of(texts[-1]))
    return torch.stack(rows)


def random_tree(rng, root, wanted, num_nodes):
    """A tree that carries a prefix of `wanted` somewhere, among random tokens, also twice under one node."""
    tokens, parents, at, depth = [root], [-1], 0, 0
    for node in range(1, num_nodes):
        if depth < len(wanted) and rng.random() < 0.5:
            tokens.append(wanted[depth])
            parents.append(at)
            at, depth = node, depth + 1
        else:
            tokens.append(rng.randrange(VOCAB))
            parents.append(rng.randrange(node))
    return tokens, parents


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([-1, 1, 3]),
        "top_p": st.sampled_from([1.0, 0.6]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.8]),
        "min_new_tokens": st.sampled_from([0, 0, 3, 5]),
        "logit_bias": st.sampled_from([None, None, {3: 2.5, 7: -100.0}]),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 2**32), num_nodes=st.integers(1, 9)
)
def test_draw_and_follow_gives_token_for_token_what_plain_decoding_gives(requests, seed, num_nodes):
    """Ids, how far it goes, and the floats of the log-probabilities, whatever was proposed."""
    rng = random.Random(seed)
    states, contexts, trees, plain = [], [], [], []
    asked = LogprobRequest(top_num=3, token_ids=[5, 1])
    for b, given_params in enumerate(requests):
        produced = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))]
        states.append(state_of(seed + b, produced, end_ids=[0, 4], **given_params))
        contexts.append([b, *produced[:-1]])
        plain.append(decode(states[b], [b, *produced], num_nodes, asked))
        trees.append(random_tree(rng, produced[-1], plain[b][0], num_nodes))
    before = [(dict(state.counts), state.num_output) for state in states]
    tree = tree_of([tokens for tokens, _ in trees], [parents for _, parents in trees])
    logits = verify(tree, contexts)
    kept = logits.clone()
    accepted = follow(tree, logits, states)
    entries = path_logprobs(logits, accepted, states, [asked] * len(states))
    assert torch.equal(logits, kept)
    assert [(state.counts, state.num_output) for state in states] == before
    for b, result in enumerate(accepted):
        count = len(result.token_ids)
        assert result.failure is None and result.num_correct_drafts == count - 1
        assert result.token_ids == plain[b][0][:count]
        assert entries[b] == plain[b][1][:count]
        assert_path_fits(result, *trees[b])
        carried = {t for t, p in zip(*trees[b], strict=True) if p == result.path[-1]}
        assert result.token_ids[-1] not in carried  # it went as far as the tree has it


@pytest.mark.parametrize("forgotten", ["counts", "num_output"])
def test_the_comparison_with_plain_decoding_would_see_a_state_that_stands_still(monkeypatch, forgotten):
    """Twin of the test above: one set of penalties, or one place in the stream, for all rows of a round."""
    states = [state_of(seed, [2], frequency_penalty=2.0) for seed in range(20)]
    plain = [decode(state, [b, 2], 4)[0] for b, state in enumerate(states)]
    tree = DraftTree.chain(torch.tensor([[2, *ids[:3]] for ids in plain]))
    logits = verify(tree, [[b] for b in range(20)])
    assert [result.token_ids for result in follow(tree, logits, states)] == plain
    step = Walk.step

    def forgetful(walk, token_id, failure=None):
        kept = walk.state.after(())
        step(walk, token_id, failure)
        setattr(walk.state, forgotten, getattr(kept, forgotten))

    monkeypatch.setattr(Walk, "step", forgetful)
    assert [result.token_ids for result in follow(tree, logits, states)] != plain


def assert_path_fits(result, tokens, parents):
    assert result.path[0] == 0
    for j, node in enumerate(result.path[1:]):
        assert parents[node] == result.path[j]
        assert tokens[node] == result.token_ids[j]


def test_a_draft_that_is_always_right_is_accepted_whole_and_a_wrong_one_not_at_all():
    state = state_of(3, [2], temperature=1.0)
    plain = decode(state, [9, 2], 5)[0]
    right = DraftTree.chain(torch.tensor([[2, *plain[:4]]]))
    wrong = DraftTree.chain(torch.tensor([[2] + [(plain[0] + 1) % VOCAB] * 4]))
    assert follow(right, verify(right, [[9]]), [state]) == [Accepted([0, 1, 2, 3, 4], plain)]
    assert follow(wrong, verify(wrong, [[9]]), [state]) == [Accepted([0], plain[:1])]


def test_greedy_and_sampled_requests_of_one_batch_do_not_disturb_each_other():
    states = [
        state_of(seed, [2], **given)
        for seed, given in enumerate([GREEDY, {}, GREEDY, {"top_k": 3}, {"min_new_tokens": 9, **GREEDY}])
    ]
    plain = [decode(state, [b, 2], 3)[0] for b, state in enumerate(states)]
    tree = DraftTree.chain(torch.tensor([[2, *ids[:2]] for ids in plain]))
    logits = verify(tree, [[b] for b in range(5)])
    together = follow(tree, logits, states)
    assert [result.token_ids for result in together] == plain
    for b, state in enumerate(states):
        alone = DraftTree(tree.token_ids[b : b + 1], tree.parents[b : b + 1])
        assert follow(alone, logits[b * 3 : b * 3 + 3], [state]) == [together[b]]


@pytest.mark.parametrize("given_params", [GREEDY, {"temperature": 1.0}, {"frequency_penalty": 0.5, **GREEDY}])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_ends_its_request_with_what_came_before(given_params, poison):
    states = [state_of(seed, [2], **given_params) for seed in range(2)]
    plain = [decode(state, [b, 2], 4)[0] for b, state in enumerate(states)]
    tree = DraftTree.chain(torch.tensor([[2, *ids[:3]] for ids in plain]))
    logits = verify(tree, [[0], [1]])
    logits[2, 5] = poison  # node 2 of request 0
    broken, healthy = follow(tree, logits, states)
    assert broken == Accepted([0, 1], plain[0][:2], NOT_FINITE)
    assert broken.num_correct_drafts == 2
    assert healthy == Accepted([0, 1, 2, 3], plain[1])
    entries = path_logprobs(logits, [broken, healthy], states, [LogprobRequest(), None])
    assert [len(of_request) for of_request in entries] == [2, 0]


@pytest.mark.parametrize("given_params", [GREEDY, {"temperature": 1.0}])
def test_a_broken_row_that_nobody_visits_disturbs_nobody(given_params):
    state = state_of(1, [2], **given_params)
    plain = decode(state, [0, 2], 1)[0]
    tree = DraftTree.chain(torch.tensor([[2, (plain[0] + 1) % VOCAB]]))
    logits = verify(tree, [[0]])
    logits[1] = math.nan
    assert follow(tree, logits, [state]) == [Accepted([0], plain)]


def test_a_row_with_nothing_left_ends_its_request_with_that_reason():
    state = state_of(1, [2], end_ids=range(VOCAB), min_new_tokens=5)
    tree = DraftTree.chain(torch.tensor([[2, 3]]))
    assert follow(tree, verify(tree, [[0]]), [state]) == [Accepted([], [], NOTHING_LEFT)]


def test_a_node_without_a_parent_is_padding():
    state = state_of(1, [2], **GREEDY)
    best = decode(state, [0, 2], 1)[0]
    tree = tree_of([[2, *best]], [[-1, -1]])
    assert follow(tree, verify(tree, [[0]]), [state]) == [Accepted([0], best)]


@pytest.mark.parametrize("given_params", [GREEDY, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_a_mask_acts_on_visited_rows_before_the_draw_and_on_log_probabilities(given_params):
    """Where structured output will enter: each row comes with its request and node."""
    states = [state_of(seed, [2], **given_params) for seed in range(2)]
    seen = []

    def even_at_the_root_then_three(nodes, rows):
        seen.extend(nodes)
        for row, (_, node) in zip(rows, nodes, strict=True):
            allowed = torch.zeros(VOCAB, dtype=torch.bool)
            allowed[torch.tensor(3 if node else range(0, VOCAB, 2))] = True
            row[~allowed] = -math.inf

    children = list(range(VOCAB))
    tree = tree_of([[2, *children]] * 2, [[-1] + [0] * VOCAB] * 2)
    logits = verify(tree, [[0], [1]])
    accepted = follow(tree, logits, states, even_at_the_root_then_three)
    assert set(seen) == {(b, node) for b in range(2) for node in accepted[b].path}
    for result in accepted:
        assert result.token_ids[0] % 2 == 0 and result.token_ids[1:] == [3]
    entries = path_logprobs(logits, accepted, states, [LogprobRequest(), None], even_at_the_root_then_three)
    assert entries[0][1].logprob == 0.0 and entries[1] == []


def test_a_mask_that_leaves_nothing_ends_the_request():
    state = state_of(1, [2], **GREEDY)
    tree = DraftTree.chain(torch.tensor([[2]]))
    nothing = follow(tree, verify(tree, [[0]]), [state], lambda nodes, rows: rows.fill_(-math.inf))
    assert nothing == [Accepted([], [], NOTHING_LEFT)]


def test_nothing_is_computed_for_log_probabilities_that_nobody_asks_for():
    accepted = [Accepted([0], [1])]
    assert path_logprobs(torch.empty(0, VOCAB), accepted, [state_of()], [None]) == [[]]

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.kernels.draw_token import Purpose, draw, uniform_rows, uniforms
from sglang.kernels.token_probs import draw_from, id_bits, kept_probs

limits = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.7, 1.0, 1.7, 1000.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, 40, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(limits, min_size=1, max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
    levels=st.sampled_from([0.5, 4, 1000]),
    vocab=st.sampled_from([1, 2, 3, 31, 300]),
)
def test_a_draw_from_the_kept_probabilities_is_the_draw_itself(rows, seed, levels, vocab):
    """So what rules compare as p is what plain decoding draws from, also where the cut is among equals."""
    generator = torch.Generator().manual_seed(seed & 0xFFFF)
    logits = (torch.randn(len(rows), vocab, generator=generator) * 3 * levels).round() / levels
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    seeds, places = [seed] * len(rows), list(range(len(rows)))
    probs = kept_probs(logits, **columns)
    assert probs.sum(dim=-1).allclose(torch.ones((), dtype=torch.float64))
    drawn = draw_from(probs, uniform_rows(seeds, places, Purpose.DRAW, range(id_bits(vocab))))
    assert drawn.tolist() == draw(logits, u=[uniforms(seed, place) for place in places], **columns)
    alone = [kept_probs(logits[i : i + 1], **{k: v[i : i + 1] for k, v in columns.items()}) for i in places]
    assert torch.equal(torch.cat(alone), probs)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_greedy_row_is_one_hot_at_its_lowest_best_id(temperature):
    """At a huge temperature all probabilities are equal, and still the best logit counts."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    probs = kept_probs(logits, temperature=[temperature], top_k=[1], top_p=[1.0], min_p=[0.0])
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53])
def test_an_id_without_weight_is_not_drawn(u):
    weights = torch.tensor([[0.0, 0.0, 0.25, 0.0, 3.0, 0.0]], dtype=torch.float64)
    assert draw_from(weights, torch.full((1, 3), u, dtype=torch.float64)).tolist() == [4 if u else 2]


@pytest.mark.parametrize("purpose", Purpose)
def test_rows_of_random_numbers_are_those_of_the_stream(purpose):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    places = [0, 5, 10**6, 1, 2, 3]
    rows = uniform_rows(seeds, places, purpose, range(60, 70)).tolist()
    streams = [uniforms(seed, place, purpose) for seed, place in zip(seeds, places, strict=True)]
    assert rows == [[stream(number) for number in range(60, 70)] for stream in streams]
    assert all(0.0 <= value < 1.0 for row in rows for value in row)


def test_purposes_share_no_number_and_do_not_go_together():
    """A coin that knew the proposal would bend the law of what is accepted."""
    count = 20_000
    streams = [uniform_rows(range(count), [3] * count, purpose, range(3)) for purpose in Purpose]
    assert len(torch.cat(streams).unique()) == len(Purpose) * count * 3
    centred = torch.cat(streams, dim=1).T - 0.5
    correlation = (centred @ centred.T) * 12 / count
    assert float((correlation - torch.eye(len(correlation))).fill_diagonal_(0).abs().max()) < 4 / math.sqrt(
        count
    )

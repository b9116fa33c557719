from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.kernels import draw_token
from sglang.kernels.draw_token import draw, draw_reference, uniforms

VOCAB = 700


def logits_of(seed, vocab=VOCAB, spread=3.0, levels=None):
    """Random logits; `levels` rounds them so that many are equal."""
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return row if levels is None else (row * levels).round() / levels


limits = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.7, 1.0, 1.7, 1000.0]),
        "top_k": st.sampled_from([-1, 2, 5, 255, 256, 257, 699, 700, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.1, 0.5, 1.0]),
        "u": st.builds(uniforms, st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000)),
    }
)


@settings(max_examples=300)
@given(
    rows=st.lists(limits, min_size=1, max_size=5),
    seed=st.integers(0, 50),
    levels=st.sampled_from([None, 0.5, 2, 16]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    vocab=st.sampled_from([1, 2, 3, 200, 256, 257, VOCAB]),
)
def test_the_fast_draw_equals_the_reference(rows, seed, levels, spread, vocab):
    """Also with many equal logits, where the cut of a ranking may fall between equals."""
    logits = torch.stack([logits_of(seed + i, vocab, spread, levels) for i in range(len(rows))])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    expected = [draw_reference(line, **row) for line, row in zip(logits, rows, strict=True)]
    assert draw(logits, **columns) == expected


def test_more_rows_than_fit_in_one_piece_are_all_drawn():
    count = draw_token._ROWS_AT_ONCE * 2 + 3
    logits = torch.stack([logits_of(i, vocab=50) for i in range(count)])
    rows = [
        {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "u": uniforms(i, 0)}
        for i in range(count)
    ]
    expected = [draw_reference(line, **row) for line, row in zip(logits, rows, strict=True)]
    assert draw(logits, **{name: [row[name] for row in rows] for name in rows[0]}) == expected


def always(u):
    """The same number for every bit."""
    return lambda bit: u


def one(logits, u, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    return draw(logits[None], temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p], u=[u])[
        0
    ]


def chi_square(probs, **given):
    """Pearson's statistic of 4000 draws against `probs`, and its degrees of freedom."""
    logits, draws = probs.log(), 4000
    counts = torch.zeros(len(probs))
    for i in range(draws):
        counts[one(logits, uniforms(99, i), **given)] += 1
    kept = probs > 0
    expected = probs[kept] * draws
    assert counts[~kept].sum() == 0
    return float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize("given_limits", [{}, {"top_k": 8}], ids=["whole vocabulary", "ranked path"])
def test_draws_follow_the_distribution(given_limits):
    """Fixed seeds, so the statistic is a fixed number; 24.3 is the 0.1 % point for seven degrees."""
    probs = torch.tensor([0.3, 0.02, 0.18, 0.1, 0.15, 0.05, 0.12, 0.08])
    statistic, freedom = chi_square(probs, **given_limits)
    assert freedom == 7
    assert 0 < statistic < 24.3


def test_the_chi_square_check_would_see_a_wrong_distribution():
    """Twin of the test above: a temperature that should not be there is far outside the bound."""
    probs = torch.tensor([0.3, 0.02, 0.18, 0.1, 0.15, 0.05, 0.12, 0.08])
    assert chi_square(probs, temperature=1.3)[0] > 24.3


def test_a_last_bit_of_noise_in_all_logits_changes_hardly_any_draw():
    """A batch of another size rounds every logit differently. One number laid on all cumulated
    probabilities would change several of these 800 draws; bit by bit the expected number is 0.01.
    """
    vocab, generator, changed = 40_000, torch.Generator().manual_seed(5), 0
    for seed in range(8):
        logits = logits_of(seed, vocab=vocab, spread=2.5)
        noisy = logits + torch.randn(vocab, generator=generator) * 5e-6
        columns = {"temperature": [0.8], "top_k": [-1], "top_p": [1.0], "min_p": [0.0]}
        columns = {name: value * 100 for name, value in columns.items()}
        us = [uniforms(seed, place) for place in range(100)]
        pairs = (draw(some.repeat(100, 1), u=us, **columns) for some in (logits, noisy))
        changed += sum(a != b for a, b in zip(*pairs, strict=True))
    assert changed == 0


def test_the_stream_of_a_seed_is_a_pure_function_in_the_unit_interval():
    places = [(seed, i) for seed in (0, 1, -1, 2**63 - 1, -(2**63)) for i in range(200)]
    values = [uniforms(seed, i)(bit) for seed, i in places for bit in (0, 15)]
    assert values == [uniforms(seed, i)(bit) for seed, i in places for bit in (0, 15)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.05


def test_neighbouring_seeds_places_and_bits_are_not_correlated():
    count = 3000
    for seed_step, place_step, bit_step in ((1, 0, 0), (0, 1, 0), (1, -1, 0), (0, 0, 1), (0, 1, -1)):
        pairs = [
            (uniforms(s, s % 7 + 1)(3), uniforms(s + seed_step, s % 7 + 1 + place_step)(3 + bit_step))
            for s in range(count)
        ]
        covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / count
        assert abs(covariance * 12) < 4 / math.sqrt(count)


def test_the_stream_is_pinned():
    """A change of the stream would change every seeded answer of every user."""
    assert [uniforms(0, 0)(0), uniforms(42, 0)(0), uniforms(42, 1)(15)] == [
        0.13870941014555427,
        0.3869742762400409,
        0.31888700995112484,
    ]


@pytest.mark.parametrize("limit", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}])
@pytest.mark.parametrize("u", [0.0, 0.999999999])
def test_the_tightest_limit_leaves_the_best_token(limit, u):
    logits = logits_of(3)
    assert one(logits, always(u), **limit) == int(logits.argmax())


def test_min_p_counts_from_the_highest_probability():
    logits = torch.tensor([0.4, 0.29, 0.21, 0.06, 0.04]).log()
    drawn = {one(logits, uniforms(7, i), min_p=0.5) for i in range(1000)}
    assert drawn == {0, 1, 2}


def test_top_p_keeps_the_token_that_reaches_it_and_no_more():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert {one(logits, uniforms(7, i), top_p=0.65) for i in range(1000)} == {1, 2}
    assert {one(logits, uniforms(7, i), top_p=0.75) for i in range(1000)} == {1, 2, 3}


def test_a_token_of_probability_zero_is_never_drawn_at_the_edges():
    logits = torch.full((10,), -math.inf)
    logits[4], logits[6] = 0.0, 0.0
    assert one(logits, always(0.0)) == 4
    assert one(logits, always(1.0 - 2**-53)) == 6
    assert one(logits, always(1.0 - 2**-53), top_k=5) == 6

"""The way from logits to tokens against its references, at every instruction set of this processor."""

import math

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.sampling import (
    apply_token_bitmask,
    apply_token_bitmask_reference,
    sample_rows,
)

BODY = """
from sgl_kernel.sampling import apply_token_bitmask, sample_rows
for name, case in cases:
    if name == "mask":
        answers.append(apply_token_bitmask(*case))
    else:
        logits, limits, seeds, positions = case
        streams = torch.stack((seeds, positions))
        answers.append(sample_rows(logits, limits, streams, is_masked=name == "masked"))
"""


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def limits_of(rows, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    return torch.tensor([[temperature, top_k, top_p, min_p]] * rows, dtype=torch.float64).view(-1, 4)


def drawn_at(level, cases, folder):
    """The ids of (logits, limits, seeds, positions), or of (logits, limits) with the rows as seeds."""
    filled = []
    for logits, limits, *stream in cases:
        places = torch.arange(len(logits))
        filled.append(("masked", (logits, limits, *(stream or (places, places * 7)))))
    found = answers_at(level, BODY, filled, folder)
    assert not any(failures.any() for _, failures in found)
    return [ids for ids, _ in found]


def kept_of(row, temperature, top_k, top_p, min_p):
    """The probabilities of what is kept of a row, by sorting all of it in float64; 0 elsewhere."""
    probs = torch.softmax(row.double() / temperature, dim=-1)
    ranked = probs.sort(descending=True, stable=True)
    keep = ranked.values >= min_p * ranked.values[0]
    if top_p < 1:
        keep &= ranked.values.cumsum(-1) - ranked.values < top_p
    if top_k > 0:
        keep[top_k:] = False
    keep[0] = True
    return torch.zeros_like(probs).scatter_(0, ranked.indices, ranked.values * keep)


LIMITS = [
    {},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 3},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"min_p": 0.05},
    {"top_k": 4000, "min_p": 1e-4},
    {"temperature": 1000.0, "top_p": 0.7},
    {"temperature": 0.01},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_only_what_is_kept_is_drawn_and_as_often_as_its_probability_says(level, limits, tmp_path):
    """3,000 draws a row; a share may be off by five deviations."""
    draws = 3000
    rows = [random(size, seed=size, scale=2.0) for size in (1, 5, 70, 700)]
    cases = [(row.repeat(draws, 1), limits_of(draws, **limits)) for row in rows]
    for row, ids in zip(rows, drawn_at(level, cases, tmp_path), strict=True):
        kept = kept_of(row, **{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **limits})
        shares = torch.bincount(ids, minlength=len(row)) / draws
        assert not shares[kept == 0].any()
        probs = kept / kept.sum()
        assert (shares - probs).abs().le(5 * (probs * (1 - probs) / draws).sqrt() + 2 / draws).all()


def test_of_equal_logits_the_lowest_ids_are_kept(level, tmp_path):
    logits = torch.zeros(400, 1000)
    logits[:, 500:] = -0.0
    [few, some] = drawn_at(
        level, [(logits, limits_of(400, top_k=3)), (logits, limits_of(400, top_p=0.25))], tmp_path
    )
    assert set(few.tolist()) == {0, 1, 2}
    assert few.shape == some.shape == (400,)
    assert 200 < int(some.max()) <= 250


def test_tokens_that_are_masked_are_never_drawn(level, tmp_path):
    logits = torch.full((300, 530), -math.inf)
    logits[:, [7, 64, 529]] = torch.tensor([1.0, 0.5, 0.7])
    cases = [(logits, limits_of(300, **limits)) for limits in LIMITS]
    for ids in drawn_at(level, cases, tmp_path):
        assert set(ids.tolist()) <= {7, 64, 529}


def test_a_draw_depends_on_its_row_seed_and_position_alone(level, tmp_path):
    rows, vocab = 12, 900
    whole = random(rows, vocab + 30, scale=3.0)
    logits = whole[:, :vocab]  # rows with a gap between them
    limits = torch.cat([limits_of(1, **LIMITS[i % len(LIMITS)]) for i in range(rows)])
    seeds, positions = torch.arange(rows) * -(2**59) - 5, torch.arange(rows) * 1000
    together = (logits, limits, seeds, positions)
    alone = [
        (logits[i : i + 1].clone(), limits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        for i in range(rows)
    ]
    nothing = (logits[:0], limits[:0], seeds[:0], positions[:0])
    [first, *others, empty] = drawn_at(level, [together, *alone, nothing], tmp_path)
    assert first.tolist() == [int(ids) for ids in others]
    assert empty.shape == (0,)


#: The row that a large temperature leaves unlike a flat one.
HUGE = 6


@pytest.mark.parametrize("vocab", [3000, 20011])
def test_rows_of_which_much_is_kept_are_drawn_as_a_sort_in_double_says(level, vocab, tmp_path):
    """Sums of floats narrow the end of such rows down and must not decide it: of equal, of very different and
    of nearly equal logits, and of those beyond the range of a float's exponential."""
    places = torch.arange(vocab)
    rows = [
        torch.zeros(vocab),
        random(vocab, seed=1, scale=0.1),
        random(vocab, seed=2, scale=5.0),
        random(vocab, seed=3).round(),
        torch.cat((torch.tensor([9.0]), random(vocab - 1, seed=4, scale=1e-3))),  # one token, and a flat rest
        -(places % 97).float() * 0.01,
        -1e30 * (places % 5).float(),  # HUGE
        1e-30 * (places % 5).float() + 1,
    ]
    wide = [
        {"top_p": 0.50013},  # not where sums of equal numbers meet it
        {"top_p": 0.99999},
        {"top_k": vocab // 2},
        {"top_k": 2500, "top_p": 0.9, "min_p": 1e-9},
        {"min_p": 1e-3},
        {"top_p": 0.90013, "temperature": 1e-35},
    ]
    cases, kept = [], []
    for at, row in enumerate(rows):
        for limits in [*wide, {"top_p": 0.90013, "temperature": 1e32}] if at == HUGE else wide:
            cases.append((row.repeat(4, 1), limits_of(4, **limits)))
            kept.append(
                kept_of(row, **{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **limits})
            )
    for probs, ids in zip(kept, drawn_at(level, cases, tmp_path), strict=True):
        assert ids.tolist() == [bitwise_draw(probs, at, 7 * at) for at in range(4)]


M = (1 << 64) - 1


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def bitwise_draw(probs, seed, position):
    """An id by its bits, the highest first, each by the weight of the ids that agree so far."""
    golden = 0x9E3779B97F4A7C15
    place = mix((mix((seed + golden) & M) + (position + 1) * golden) & M)
    token = 0
    for bit in reversed(range((len(probs) - 1).bit_length())):
        u = (mix((place + (bit + 1) * golden) & M) >> 11) * 2.0**-53
        middle = token + (1 << bit)
        left, right = float(probs[token:middle].sum()), float(probs[middle : middle + (1 << bit)].sum())
        if right > 0 and u * (left + right) >= left:
            token = middle
    return token


@pytest.mark.parametrize("top_k", [1, -1], ids=["greedy", "drawn"])
def test_a_row_without_a_token_says_why_wherever_the_number_stands(level, top_k, tmp_path):
    places = [0, 63, 64, 700, 1023, 1024, 1029]
    cases, expected = [], []
    for number in (math.nan, math.inf, -math.inf):
        logits = random(len(places) + 2, 1030, seed=5)
        for row, place in enumerate(places):
            logits[row, place] = number
        logits[-2] = number
        stream = torch.zeros(len(logits), dtype=torch.int64)
        cases += [
            (name, (logits, limits_of(len(logits), top_k=top_k), stream, stream))
            for name in ("draw", "masked")
        ]
        is_mask = number == -math.inf
        expected += [[1] * 8 + [0], [0 if is_mask else 2] * 7 + [2, 0]]
    found = answers_at(level, BODY, cases, tmp_path)
    assert [failures.tolist() for _, failures in found] == expected
    assert all(bool(((ids >= 0) & (ids < 1030)).all()) for ids, _ in found)


def test_rows_are_those_of_their_places():
    logits = random(9, 700, scale=3.0)
    limits, streams = torch.cat((limits_of(2), limits_of(2, top_k=1))), torch.arange(8).view(2, 4)
    places = torch.tensor([7, 0, 7, 3])
    expected = sample_rows(logits[places], limits, streams)
    assert torch.equal(sample_rows(logits, limits, streams, places=places), expected)
    nothing = sample_rows(logits, limits[:0], streams[:, :0], places=places[:0])
    assert nothing.shape == (2, 0)
    with pytest.raises(RuntimeError, match="places are 0 to 8, got 9"):
        sample_rows(logits, limits, streams, places=places + 2)
    with pytest.raises(RuntimeError, match="limits is contiguous"):
        sample_rows(logits, limits, streams, places=places[:3])


def test_masked_tokens_become_minus_infinity_in_the_rows_that_are_named(level, tmp_path):
    cases = []
    for vocab in (1, 31, 32, 33, 300):
        rows = torch.tensor([4, 0, 3])
        words = torch.randint(-(2**31), 2**31, (3, 10), generator=torch.Generator().manual_seed(vocab))
        words[1] = -1
        cases.append((random(5, vocab + 3)[:, :vocab], words.int(), rows))
    cases.append((random(2, 40), torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)))
    found = answers_at(level, BODY, [("mask", case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert torch.equal(out, apply_token_bitmask_reference(*case))


LONGS = torch.zeros(2, dtype=torch.int64)
STREAMS = torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sample_rows(random(2, 8).double(), limits_of(2), STREAMS), "float32"),
        (lambda: sample_rows(random(2, 0), limits_of(2), STREAMS), "vocab is 1 to"),
        (lambda: sample_rows(random(8, 2).t(), limits_of(2), STREAMS), "row of logits is contiguous"),
        (lambda: sample_rows(random(2, 8), limits_of(3), STREAMS), "limits is contiguous float64"),
        (lambda: sample_rows(random(2, 8), limits_of(2), STREAMS.int()), "contiguous int64"),
        (lambda: apply_token_bitmask(random(2, 33), LONGS[:, None].int(), LONGS), "1 words hold no bit"),
        (lambda: apply_token_bitmask(random(2, 8), LONGS[:, None].int(), LONGS + 2), "rows are 0 to 1"),
        (lambda: apply_token_bitmask(random(2, 8), LONGS[:, None], LONGS), "bitmask is contiguous int32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, said):
    with pytest.raises(RuntimeError, match=said):
        call()


def test_the_operators_keep_torchs_rules():
    out = torch.empty(2, 3, dtype=torch.int64)
    streams = torch.zeros_like(out)
    for is_masked in (False, True):
        torch.library.opcheck(
            torch.ops.sgl_kernel.sample_rows.default,
            (random(3, 90), None, limits_of(3), streams, is_masked, out),
        )
    words = torch.zeros(1, 3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.sgl_kernel.apply_token_bitmask.default, (random(3, 90), words, LONGS[:1]))

"""Log-probabilities of given and of the best tokens against their reference, at every instruction set."""

import math

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.logprobs import (
    AskedRows,
    top_logprobs,
    top_logprobs_reference,
    top_probs,
    top_probs_reference,
)

BODY = """
from sgl_kernel.logprobs import AskedRows, top_logprobs
for logits, numbers, divisors, ids, most in cases:
    answers.append(top_logprobs(logits, AskedRows(numbers, divisors, ids), most))
"""
#: How far a logarithm may be from the reference, whose sum is in float64; torch's own in float32 is off by
#: up to 6e-6.
TOLERANCE = {"rtol": 2.5e-7, "atol": 1e-6}


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def asked(logits, most, *, rows=None, tokens=2, temperatures=(1.0, 0.7, 3.0, 1e-6)):
    """Some tokens of each row, one more than of the row before, and the best `most` of every second."""
    rows = torch.arange(len(logits)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    ends = torch.cumsum(torch.arange(tokens, tokens + len(rows)), dim=0)
    ids = torch.arange(int(ends[-1]) if len(rows) else 0) * 7919 % logits.shape[1]
    counts = torch.tensor([most if at % 2 == 0 else most // 2 for at in range(len(rows))], dtype=torch.int64)
    divisors = torch.tensor([temperatures[at % len(temperatures)] for at in range(len(rows))])
    return logits, torch.stack((rows, ends, counts)), divisors, ids, most


def compare(case, found):
    logits, numbers, divisors, ids, most = case
    own, top, top_ids = found
    wanted_own, wanted_top, wanted_ids = top_logprobs_reference(
        logits, AskedRows(numbers, divisors, ids), most
    )
    torch.testing.assert_close(own, wanted_own, **TOLERANCE)
    for at, count in enumerate(numbers[2].tolist()):
        torch.testing.assert_close(top[at, :count], wanted_top[at, :count], **TOLERANCE)
        assert top_ids[at, :count].tolist() == wanted_ids[at, :count].tolist()


def test_the_numbers_are_the_references_at_odd_sizes(level, tmp_path):
    cases = [
        asked(random(1, 1), 1),
        asked(random(3, 17, scale=4.0), 5),
        asked(random(5, 700, scale=4.0), 0),
        asked(random(4, 5001, scale=3.0), 20),
        asked(random(2, 49152, scale=3.0), 20),
        asked(random(3, 4096, scale=3.0), 4096),  # all of them
        asked(
            random(6, 900, scale=4.0)[:, 3:850], 7, rows=[5, 0, 0, 3]
        ),  # some rows, with a gap between them
        asked(random(2, 900), 7, rows=[]),
    ]
    for case, found in zip(cases, answers_at(level, BODY, cases, tmp_path), strict=True):
        compare(case, found)


def test_of_equal_values_the_lower_ids_come_first(level, tmp_path):
    steps = random(4, 3000, scale=2.0).round()
    level_rows = torch.zeros(2, 3000)
    level_rows[0, ::3] = -0.0
    cases = [asked(steps, 400, temperatures=(1.0, 0.5)), asked(level_rows, 30)]
    for case, found in zip(cases, answers_at(level, BODY, cases, tmp_path), strict=True):
        compare(case, found)


def test_logits_that_round_to_one_logarithm_are_listed_by_id(level, tmp_path):
    """The next float below, divided by 8, gives the same logarithm: then the id decides, not the logit."""
    logits = torch.full((1, 300), -9.0)
    logits[0, [250, 7, 130]] = torch.tensor([math.nextafter(1.0, 2.0), 1.0, 1.0])
    logits[0, 299] = 9.0
    case = asked(logits, 3, temperatures=(8.0,))
    ((_, _, ids),) = answers_at(level, BODY, [case], tmp_path)
    assert ids.tolist() == [[299, 7, 130]]


def test_masked_tokens_are_as_unlikely_as_can_be(level, tmp_path):
    logits = torch.full((2, 530), -math.inf)
    logits[:, [7, 64, 529]] = torch.tensor([1.0, 0.5, 0.7])
    case = asked(logits, 6, tokens=200)
    ((own, top, ids),) = answers_at(level, BODY, [case], tmp_path)
    compare(case, (own, top, ids))
    assert ids[0, :4].tolist() == [7, 529, 64, 0] and top[0, 3] == -math.inf


def test_a_token_has_one_value_wherever_it_is_listed(level, tmp_path):
    logits = random(3, 2000, scale=3.0)
    best = logits.topk(9, dim=-1).indices
    numbers = torch.tensor([[0, 1, 2], [9, 18, 27], [9, 9, 9]])
    case = (logits, numbers, torch.tensor([0.7, 1.0, 1.3]), best.flatten(), 9)
    ((own, top, ids),) = answers_at(level, BODY, [case], tmp_path)
    assert torch.equal(ids, best) and torch.equal(own.view(3, 9), top)


PROBS = """
from sgl_kernel.logprobs import top_probs
for case in cases:
    answers.append(top_probs(*case))
"""


def test_the_best_tokens_come_with_their_share_of_the_softmax(level, tmp_path):
    cases = [
        (random(1, 1), 1),
        (random(3, 17, scale=4.0), 5),
        (random(4, 8192, scale=3.0), 4),
        (random(5, 5001, scale=0.1)[:, 3:4900], 8),
        (random(3, 900).round(), 64),
        (random(2, 70), 70),
        (random(2, 70), 0),
        (random(0, 70), 3),
    ]
    cases[2][0][:, ::2] = -math.inf
    for case, (ids, probs) in zip(cases, answers_at(level, PROBS, cases, tmp_path), strict=True):
        wanted = top_probs_reference(*case)
        assert torch.equal(ids, wanted[0])
        torch.testing.assert_close(probs, wanted[1], rtol=1e-5, atol=1e-7)


def test_a_row_that_is_not_finite_has_no_probable_token(level, tmp_path):
    logits = random(4, 90)
    logits[0, 80], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    ((ids, probs),) = answers_at(level, PROBS, [(logits, 3)], tmp_path)
    assert ids[:3].tolist() == [[0, 1, 2]] * 3 and not probs[:3].any() and probs[3].all()


LONGS, ONES = torch.zeros(2, dtype=torch.int64), torch.ones(2)


def call(logits=None, numbers=((0, 1), (1, 2), (1, 1)), divisors=ONES, ids=LONGS, most=1):
    logits = random(2, 8) if logits is None else logits
    return top_logprobs(logits, AskedRows(torch.tensor(numbers), divisors, ids), most)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"logits": random(2, 8).double()}, "float32"),
        ({"logits": random(8, 2).t()}, "row of logits is contiguous"),
        ({"numbers": ((0, 2), (1, 2), (1, 1))}, "rows are 0 to 1, got 2"),
        ({"numbers": ((0, 1), (1, 3), (1, 1))}, "ends ascend up to 2, got 3"),
        ({"numbers": ((0, 1), (1, 1), (1, 1))}, "the last end is 2, got 1"),
        ({"numbers": ((0, 1), (1, 2), (1, 2))}, "counts are 0 to 1, got 2"),
        ({"numbers": ((0, 1), (1, 2), (9, 1)), "most": 9}, "counts are 0 to 8, got 9"),
        ({"ids": LONGS + 8}, "ids are 0 to 7, got 8"),
        ({"divisors": ONES[:1]}, "asked is contiguous int64"),
        ({"divisors": ONES.double()}, "divisors is contiguous float32"),
        ({"ids": LONGS.int()}, "ids and own are contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, said):
    call()
    with pytest.raises(RuntimeError, match=said):
        call(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((random(2, 8).double(), 1), "float32"),
        ((random(8, 2).t(), 1), "row of logits is contiguous"),
        ((random(2, 8), 9), "9 of 8 tokens"),
    ],
)
def test_more_than_there_is_cannot_be_best(arguments, said):
    with pytest.raises(RuntimeError, match=said):
        top_probs(*arguments)


def test_the_operators_keep_torchs_rules():
    best = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)
    torch.library.opcheck(torch.ops.sgl_kernel.top_probs.default, (random(3, 90), *best))
    logits, numbers, divisors, ids, most = asked(random(3, 90), 4)
    outs = (torch.empty(len(ids)), torch.zeros(3, most), torch.zeros(3, most, dtype=torch.int64))
    torch.library.opcheck(torch.ops.sgl_kernel.top_logprobs.default, (logits, numbers, divisors, ids, *outs))

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import pytest
import torch

from sglang.kernels import sample_tokens
from sglang.kernels.draw_token import draw_reference, uniforms
from sglang.kernels.sample_tokens import (
    NOT_FINITE,
    NOTHING_TO_DRAW,
    RowDraw,
    RowDraws,
    best_tokens,
    sample_rows,
)

ROWS = 40
LIMITS = {
    "nothing taken away": {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
    "the usual": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "top_p of a flat row": {"temperature": 3.0, "top_k": -1, "top_p": 0.93, "min_p": 0.0},
    "min_p": {"temperature": 1.3, "top_k": -1, "top_p": 1.0, "min_p": 0.03},
    "many": {"temperature": 1.7, "top_k": 3000, "top_p": 0.999, "min_p": 0.0},
    "nearly greedy": {"temperature": 0.01, "top_k": 10**9, "top_p": 0.9, "min_p": 0.0},
}


def logits_of(vocab):
    return torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 2.5


@pytest.fixture(params=[True, False], ids=["as installed", "in torch"])
def kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(sample_tokens, "kernels_for", lambda logits: None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("vocab", [1, 50, 64, 4097, 49152])
def test_a_seed_and_a_position_give_the_token_of_the_reference(vocab, limits):
    """Whoever keeps a seed keeps its text, whether the kernels are installed or not."""
    logits = logits_of(vocab)
    seeds = [(-1) ** i * (2**58 + 12345) * i for i in range(ROWS)]
    positions = [i * i for i in range(ROWS)]
    rows = [RowDraw(**limits, seed=seed) for seed in seeds]
    ids, failures = sample_rows(logits, RowDraws(rows), positions).tolist()
    wanted = [
        draw_reference(row, **limits, u=uniforms(seed, position))
        for row, seed, position in zip(logits, seeds, positions, strict=True)
    ]
    assert ids == wanted and not any(failures)


@pytest.mark.usefixtures("kernels")
def test_the_best_token_is_the_lowest_of_equals_and_rows_that_are_not_finite_are_told():
    logits = logits_of(4097).round()
    logits[3, 4000] = float("nan")
    logits[7, 4096] = float("inf")
    ids, finite = best_tokens(logits)
    assert torch.equal(ids[finite], logits.argmax(dim=-1)[finite])
    assert (~finite).nonzero()[:, 0].tolist() == [3, 7]


@pytest.mark.usefixtures("kernels")
def test_a_row_is_drawn_alike_beside_greedy_rows_and_step_after_step():
    """The tensors of a batch are kept between steps; only the positions are other ones."""
    logits = logits_of(700)
    limits = list(LIMITS.values())
    rows = [
        RowDraw(**{**limits[at % len(limits)], **({"top_k": 1} if at % 3 == 0 else {})}, seed=at)
        for at in range(ROWS)
    ]
    together = RowDraws(rows)
    for step in (0, 5):
        ids = sample_rows(logits, together, [step + at for at in range(ROWS)])[0].tolist()
        alone = [
            int(sample_rows(logits[at : at + 1], RowDraws([row]), [step + at])[0])
            for at, row in enumerate(rows)
        ]
        assert ids == alone
        assert ids[::3] == logits[::3].argmax(dim=-1).tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("top_k", [1, -1], ids=["greedy", "drawn"])
def test_rows_without_a_token_say_why_and_masked_tokens_are_no_reason(top_k):
    logits = logits_of(700)
    logits[3, 69], logits[7, 640], logits[11, 699] = float("nan"), float("inf"), -float("inf")
    logits[12] = -float("inf")
    draws = RowDraws([RowDraw(1.0, top_k, 0.9, 0.0, seed=4)] * ROWS)
    plain = sample_rows(logits, draws, [0] * ROWS)[1].tolist()
    assert {at: reason for at, reason in enumerate(plain) if reason} == dict.fromkeys(
        (3, 7, 11, 12), NOT_FINITE
    )
    ids, failures = sample_rows(logits, draws, [0] * ROWS, is_masked=True).tolist()
    assert {at: reason for at, reason in enumerate(failures) if reason} == dict.fromkeys(
        (3, 7, 12), NOTHING_TO_DRAW
    )
    assert ids[11] != 699


@pytest.mark.usefixtures("kernels")
def test_no_rows_give_no_tokens():
    for is_masked in (False, True):
        assert sample_rows(torch.empty(0, 9), RowDraws([]), [], is_masked=is_masked).tolist() == [[], []]
    assert best_tokens(torch.empty(0, 9))[0].tolist() == []

"""The greedy choice of rows against its reference, at every instruction set of this processor."""

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.argmax import argmax_rows, argmax_rows_reference

BODY = """
from sgl_kernel.argmax import argmax_rows
answers.extend(argmax_rows(case) for case in cases)
"""


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_ids_and_finite_rows_are_the_references_at_odd_sizes(level, tmp_path):
    cases = [
        draw(rows, count) for rows, count in ((1, 1), (3, 17), (2, 2048), (5, 5001), (0, 8), (16, 49152))
    ]
    cases.append(draw(4, 300)[:, 3:290])  # rows with a gap between them
    cases.append(draw(6, 4100).round())  # the highest is there many times
    cases.append(torch.zeros(2, 2100))
    cases.append(torch.tensor([[-0.0, 0.0, -1.0]]))
    found = answers_at(level, BODY, cases, tmp_path)
    for case, (ids, is_finite) in zip(cases, found, strict=True):
        wanted = argmax_rows_reference(case)
        assert torch.equal(ids, wanted[0]) and torch.equal(is_finite, wanted[1])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_seen_wherever_it_stands(level, number, tmp_path):
    places = [0, 1, 2047, 2048, 2100, 4098, 4099]
    x = draw(len(places) + 1, 4100)
    for row, place in enumerate(places):
        x[row, place] = number
    ((ids, is_finite),) = answers_at(level, BODY, [x], tmp_path)
    assert is_finite.tolist() == [False] * len(places) + [True]
    assert ids[-1] == x[-1].argmax() and bool(((ids >= 0) & (ids < 4100)).all())


def test_rows_without_any_finite_number_have_an_id_of_theirs():
    x = torch.stack([torch.full((100,), number) for number in (float("nan"), -float("inf"), float("inf"))])
    ids, is_finite = argmax_rows(x)
    assert not is_finite.any() and bool(((ids >= 0) & (ids < 100)).all())


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(2, 4).double(), "x is float32"),
        (torch.ones(4), r"\[rows, numbers\]"),
        (torch.ones(2, 0), "a number a row"),
        (torch.ones(4, 2).t(), "side by side"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x, said):
    with pytest.raises(RuntimeError, match=said):
        argmax_rows(x)


def test_the_operator_keeps_torchs_rules():
    outs = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)
    torch.library.opcheck(torch.ops.sgl_kernel.argmax_rows.default, (draw(3, 40), *outs))

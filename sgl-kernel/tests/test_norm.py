"""The normalisation kernel against its reference, at every instruction set that this processor has."""

import os

import pytest
import torch
from isa_levels import answers_at, supported_levels

import sgl_kernel
from sgl_kernel.norm import fused_add_rmsnorm, fused_add_rmsnorm_reference, rmsnorm, rmsnorm_reference

# Widths around the register sizes (4, 8, 16), a model's width, a single column, and none.
SHAPES = ((1, 576), (7, 576), (3, 17), (2, 16), (2, 15), (5, 1), (1, 64), (130, 640), (0, 576), (3, 0))
EPS = 1e-5

#: The arguments are written in place over there.
BODY = """
for case in cases:
    sgl_kernel.fused_add_rmsnorm(*case, 1e-5)
    answers.append(case)
"""


def make_cases(dtype):
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return [(draw(rows, hidden), draw(rows, hidden) * 3, draw(hidden)) for rows, hidden in SHAPES]


def assert_close(got, wanted):
    if got.dtype == torch.bfloat16:
        # The sums run in another order, so a value may fall on the other side of a rounding step: one step,
        # not two.
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2**-7, atol=1e-6)
    else:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_kernel_equals_the_reference(level, dtype, tmp_path):
    cases = make_cases(dtype)
    answers = answers_at(level, BODY, cases, tmp_path)
    for (x, residual, weight), (got, got_residual, got_weight) in zip(cases, answers, strict=True):
        wanted, wanted_residual = fused_add_rmsnorm_reference(x, residual, weight, EPS)
        assert torch.equal(got_residual, wanted_residual)  # one addition and one rounding: nothing may differ
        assert_close(got, wanted)
        assert torch.equal(got_weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_norm_alone_equals_the_reference(level, dtype, tmp_path):
    cases = [(x, weight, torch.full_like(x, 7.0)) for x, _, weight in make_cases(dtype)]
    body = "for case in cases:\n    answers.append(sgl_kernel.rmsnorm(*case, 1e-5))"
    for (x, weight, _), got in zip(cases, answers_at(level, body, cases, tmp_path), strict=True):
        assert_close(got, rmsnorm_reference(x, weight, EPS))


def test_the_norm_may_be_written_over_its_input_and_keeps_torchs_rules():
    x, _, weight = make_cases(torch.float32)[1]
    wanted = rmsnorm(x, weight, torch.empty_like(x), EPS)
    assert torch.equal(rmsnorm(x.clone(), weight, torch.empty_like(x), EPS), wanted)
    copy = x.clone()
    assert torch.equal(rmsnorm(copy, weight, copy, EPS), wanted)
    torch.library.opcheck(torch.ops.sgl_kernel.rmsnorm.default, (x, weight, torch.empty_like(x), EPS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(4), torch.ones(4), torch.ones(4)), r"input is \[rows, hidden\]"),
        ((torch.ones(2, 4), torch.ones(5), torch.ones(2, 4)), r"weight is \[4\]"),
        ((torch.ones(2, 4), torch.ones(4), torch.ones(3, 4)), "out has the shape of input"),
        ((torch.ones(4, 2).t(), torch.ones(4), torch.ones(2, 4)), "contiguous"),
        ((torch.ones(2, 4), torch.ones(4).bfloat16(), torch.ones(2, 4)), "one dtype"),
        ((torch.ones(2, 4).half(), torch.ones(4).half(), torch.ones(2, 4).half()), "no other dtype"),
    ],
)
def test_arguments_of_the_norm_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(RuntimeError, match=said):
        rmsnorm(*arguments)


def test_rounding_to_bfloat16_is_that_of_torch(level, tmp_path):
    """Ties, the largest values, denormals, infinities and NaN, which shifting alone gets wrong."""
    special = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 3.3e38, 1e-40, 2**-133]
    values = torch.cat([torch.tensor(special), torch.randn(64 - len(special))]).to(torch.bfloat16)
    added = torch.cat([torch.zeros(len(special)), torch.randn(64 - len(special))]).to(torch.bfloat16)
    ties = (
        torch.tensor([1.0, 1.0 + 2**-7]).to(torch.bfloat16),
        torch.tensor([2**-8, 2**-8]).to(torch.bfloat16),
    )
    residual = torch.cat([values, ties[0]]).reshape(1, -1)
    x = torch.cat([added, ties[1]]).reshape(1, -1)
    weight = torch.ones(residual.shape[1], dtype=torch.bfloat16)
    answers = answers_at(level, BODY, [(x, residual, weight)], tmp_path)
    torch.testing.assert_close(answers[0][1], x + residual, rtol=0, atol=0, equal_nan=True)


def test_the_best_level_is_picked_where_none_is_forced():
    if os.environ.get("SGL_KERNEL_ISA"):
        pytest.skip("SGL_KERNEL_ISA is set")
    assert sgl_kernel.isa_level() == supported_levels()[-1]


def test_an_unknown_level_is_refused_with_the_names(tmp_path):
    with pytest.raises(AssertionError, match="use one of base, avx2, avx512, avx512_vnni_bf16"):
        answers_at("sse9", BODY, make_cases(torch.float32), tmp_path)


def test_the_reference_is_the_norm_of_the_sum():
    """The reference is what everything else is held to, so it is held to arithmetic written out by hand."""
    x, residual, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 10.0])
    normalised, total = fused_add_rmsnorm_reference(x, residual, weight, 0.0)
    assert total.tolist() == [[3.0, 4.0]]
    rms = ((9 + 16) / 2) ** 0.5
    torch.testing.assert_close(normalised, torch.tensor([[3 / rms, 40 / rms]]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(4), torch.ones(4), torch.ones(4)), r"input is \[rows, hidden\]"),
        ((torch.ones(2, 4), torch.ones(3, 4), torch.ones(4)), "residual has the shape of input"),
        ((torch.ones(2, 4), torch.ones(2, 4), torch.ones(5)), r"weight is \[4\]"),
        ((torch.ones(4, 2).t(), torch.ones(2, 4), torch.ones(4)), "contiguous"),
        ((torch.ones(2, 4), torch.ones(2, 4), torch.ones(4).bfloat16()), "one dtype"),
        ((torch.ones(2, 4).half(), torch.ones(2, 4).half(), torch.ones(4).half()), "no other dtype"),
        ((torch.ones(2, 4),) * 2 + (torch.ones(4),), "two tensors"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(RuntimeError, match=said):
        fused_add_rmsnorm(*arguments)


def test_several_threads_give_the_answer_of_one():
    x, residual, weight = make_cases(torch.float32)[7]
    wanted, wanted_residual = x.clone(), residual.clone()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        fused_add_rmsnorm(wanted, wanted_residual, weight, EPS)
        torch.set_num_threads(2)
        fused_add_rmsnorm(x, residual, weight, EPS)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(x, wanted) and torch.equal(residual, wanted_residual)


def test_the_operator_keeps_torchs_rules():
    """Schema, fake form and in-place writes as declared: what `torch.compile` relies on."""
    torch.library.opcheck(
        torch.ops.sgl_kernel.fused_add_rmsnorm.default, (*make_cases(torch.float32)[0], EPS)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normalised_in_place_also_between_others(level, dtype, tmp_path):
    cases = []
    for rows, heads, dim, before, after in (
        (1, 3, 64, 0, 2),
        (5, 2, 20, 1, 0),
        (3, 1, 7, 2, 2),
        (0, 2, 8, 0, 0),
    ):
        whole = torch.randn(rows, before + heads + after, dim).to(dtype)
        cases.append((whole, before, heads, torch.randn(dim).to(dtype)))
    body = """for whole, first, heads, weight in cases:
    sgl_kernel.rmsnorm_heads(whole[:, first : first + heads], weight, 1e-5)
    answers.append(whole)"""
    for (whole, first, heads, weight), got in zip(
        cases, answers_at(level, body, cases, tmp_path), strict=True
    ):
        wanted = whole.clone()
        wanted[:, first : first + heads] = rmsnorm_reference(whole[:, first : first + heads], weight, EPS)
        assert_close(got, wanted)


def test_heads_that_do_not_lie_side_by_side_are_refused():
    x = torch.ones(2, 4, 6)
    with pytest.raises(RuntimeError, match="lie side by side"):
        sgl_kernel.rmsnorm_heads(x.transpose(1, 2)[:, :, :4], torch.ones(4), EPS)
    with pytest.raises(RuntimeError, match=r"weight contiguous \[dim\]"):
        sgl_kernel.rmsnorm_heads(x, torch.ones(5), EPS)

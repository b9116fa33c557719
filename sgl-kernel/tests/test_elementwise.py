"""The small operations of a layer against their references, at every instruction set of this processor."""

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.elementwise import (
    rotary_cos_sin,
    rotary_cos_sin_reference,
    rotate_heads,
    rotate_heads_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

TYPES = {"float32": (torch.float32, 2e-6), "bfloat16": (torch.bfloat16, 8e-3)}

BODY = """
import torch
from sgl_kernel.elementwise import rotary_cos_sin, rotate_heads, silu_and_mul
for name, case in cases:
    if name == "silu":
        answers.append(silu_and_mul(case, case.new_empty(case.shape[0], case.shape[1] // 2)))
    elif name == "rotate":
        answers.append(rotate_heads(*case))
    else:
        positions, frequencies, dtype = case
        cos, sin = (torch.empty(len(positions), 2 * len(frequencies), dtype=dtype) for _ in range(2))
        rotary_cos_sin(positions, frequencies, cos, sin)
        answers.append(torch.stack((cos, sin)))
"""


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(found, wanted, tolerance):
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gate_equals_its_reference_also_far_from_zero_and_at_odd_sizes(level, dtype, tmp_path):
    kind, tolerance = TYPES[dtype]
    cases = [
        draw(rows, 2 * size, dtype=kind, scale=20.0) for rows, size in ((1, 1536), (3, 17), (5, 1), (0, 8))
    ]
    cases.append(torch.tensor([[100.0, -100.0, 0.0, -87.5, 1.0, 1.0, 1.0, 1.0]], dtype=kind))
    cases.append(draw(4, 40, dtype=kind)[:, :34])  # rows with a gap between them
    found = answers_at(level, BODY, [("silu", case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert_near(out, silu_and_mul_reference(case), tolerance)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gate_that_is_no_number_stays_none(level, dtype, tmp_path):
    kind, _ = TYPES[dtype]
    case = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], dtype=kind)
    [out] = answers_at(level, BODY, [("silu", case)], tmp_path)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_rotated_heads_equal_the_reference_at_odd_sizes_and_strides(level, dtype, tmp_path):
    kind, tolerance = TYPES[dtype]
    cases = []
    for rows, heads, dim, spare in ((1, 12, 64, 3), (7, 2, 20, 0), (33, 1, 2, 1), (0, 4, 16, 0)):
        whole = draw(rows, heads + spare, dim, dtype=kind, seed=dim)
        angles = draw(rows, dim, seed=rows)
        cases.append((whole[:, :heads], angles.cos().to(kind), angles.sin().to(kind)))
    found = answers_at(level, BODY, [("rotate", case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert_near(out, rotate_heads_reference(*case), 4 * tolerance)


@pytest.mark.parametrize("dtype", TYPES)
def test_cosines_and_sines_equal_the_reference_at_far_positions(level, dtype, tmp_path):
    kind, tolerance = TYPES[dtype]
    positions = torch.tensor([0, 1, 77, 8191, 131071, 1_000_003])
    cases = [(positions, 10000.0 ** -(torch.arange(half) / half), kind) for half in (32, 5, 1)]
    cases.append((positions[:0], torch.ones(4), kind))
    found = answers_at(level, BODY, [("angles", case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert_near(out, torch.stack(rotary_cos_sin_reference(*case)), tolerance)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: silu_and_mul(draw(2, 8), draw(2, 3)), "half of it"),
        (lambda: silu_and_mul(draw(2, 8).half(), draw(2, 4).half()), "no other dtype"),
        (lambda: rotate_heads(draw(2, 3, 5), draw(2, 5), draw(2, 5)), "even dim"),
        (lambda: rotate_heads(draw(2, 3, 4), draw(2, 6), draw(2, 4)), "cos and sin are contiguous"),
        (
            lambda: rotary_cos_sin(torch.zeros(2), draw(3), draw(2, 6), draw(2, 6)),
            "positions is contiguous int64",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, said):
    with pytest.raises(RuntimeError, match=said):
        call()

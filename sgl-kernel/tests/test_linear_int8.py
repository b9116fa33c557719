"""Linear layers over int8 weights against their reference, to the last bit, at every instruction set."""

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.linear_int8 import (
    MOST_INPUTS,
    linear_int8,
    linear_int8_reference,
    pack_int8,
    pack_int8_reference,
    quantized_rows,
    unpack_int8,
)

#: Around the sizes of a block of rows (4, 12, 14), and more than are taken at once (192).
ROWS = (0, *range(1, 17), 23, 29, 40, 200)
#: (outputs, inputs): around a panel and a four, a model's, a single number, and none.
SHAPES = ((576, 192), (33, 47), (100, 7), (1, 1), (31, 64), (64, 0), (97, 1538))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

BODY = """
from sgl_kernel.linear_int8 import linear_int8
for x, packed, bias, out in cases:
    answers.append(linear_int8(x, packed, bias, out))
"""


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(outputs, inputs, seed=0):
    """Numbers over all of int8, with rows at both ends of it, and scales."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    numbers[0], numbers[-1] = 127, -128
    return numbers, torch.rand(outputs, generator=generator) * 0.1


def call_of(x, weight, bias=None):
    """Arguments of the kernel; out is a part of wider rows that are not zero."""
    outputs = len(weight[0])
    return x, pack_int8(*weight), bias, torch.full((len(x), outputs + 5), 7.0, dtype=x.dtype)[:, 2:-3]


def same(found, wanted):
    return torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_every_bit_is_the_references(level, dtype, tmp_path):
    """Odd sizes, rows that lie in wider ones, rows of zeros, with a bias and without."""
    cases = []
    for seed, (outputs, inputs) in enumerate(SHAPES):
        weight = weight_of(outputs, inputs, seed)
        for rows in ROWS:
            x = draw(rows, inputs + 3, dtype=dtype, seed=rows) * 3
            x = x[:, 1 : inputs + 1] if rows % 2 else x[:, :inputs].contiguous()
            x[: rows // 4] = 0
            cases.append((x, weight, draw(outputs, dtype=dtype, seed=9) if rows % 3 else None))
    found = answers_at(level, BODY, [call_of(*case) for case in cases], tmp_path)
    for (x, weight, bias), answer in zip(cases, found, strict=True):
        assert torch.equal(answer, linear_int8_reference(x, *weight, bias)), (x.shape, weight[0].shape)


def naive_pairs(x, numbers):
    """Sums of products whose pairs stop at the ends of 16 bits, as a careless use of `maddubs` has them."""
    above = x.int() + 128
    pairs = (above.view(len(x), 1, -1, 2) * numbers.int().view(1, len(numbers), -1, 2)).sum(-1)
    return pairs.clamp(-32768, 32767).sum(-1) - 128 * numbers.int().sum(-1)


def test_pairs_of_the_largest_products_do_not_saturate(level, tmp_path):
    """The twin: pairs that stop at 16 bits, as `maddubs` of 255 with 127 does, are far off here."""
    weight = weight_of(40, 64)
    x = torch.tensor([[127.0, 127.0], [-127.0, -127.0], [127.0, -127.0]]).repeat(1, 32)
    found = answers_at(level, BODY, [call_of(x, weight)], tmp_path)[0]
    numbers, _ = quantized_rows(x)
    assert torch.equal(numbers.float(), x), "the scale is 1, so sums can be read off"
    exact = (numbers @ weight[0].double().T).float() * weight[1]
    assert torch.equal(found, exact)
    naive = naive_pairs(x, weight[0]).float() * weight[1]
    assert (naive - exact).abs().max() > 0.1 * exact.abs().max()


def test_the_largest_sum_fits_and_a_wider_one_is_refused(level, tmp_path):
    weight = torch.full((2, MOST_INPUTS), -128, dtype=torch.int8), torch.ones(2)
    x = torch.full((1, MOST_INPUTS), 127.0)
    found = answers_at(level, BODY, [call_of(x, weight)], tmp_path)[0]
    assert found.tolist() == [[-128.0 * 127 * MOST_INPUTS] * 2]
    with pytest.raises(ValueError, match="131072 inputs at most, and the weight has 131073"):
        pack_int8(torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1))
    wide = torch.zeros(1, 32 * (MOST_INPUTS + 12), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="131072 inputs at most, and x has 131073"):
        linear_int8(torch.zeros(1, MOST_INPUTS + 1), wide, None, torch.empty(1, 1))


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(level, dtype, tmp_path):
    """What makes an answer independent of its neighbours, of chunks and of what a draft proposes."""
    weight, x = weight_of(600, 193), draw(200, 193, dtype=dtype)
    places = [(first, size) for size in (1, 2, 7, 14, 40) for first in (0, 13, 150)]
    calls = [call_of(x[first : first + size], weight) for first, size in places]
    whole, *pieces = answers_at(level, BODY, [call_of(x, weight), *calls], tmp_path)
    for (first, size), piece in zip(places, pieces, strict=True):
        assert torch.equal(piece, whole[first : first + size])


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_numbers_that_are_not_finite_or_hardly_there_stay_in_their_row(level, dtype, tmp_path):
    weight, x = weight_of(40, 67), draw(14, 67, dtype=dtype)
    x[3, 5], x[7, 66], x[8, 0] = float("nan"), float("inf"), float("-inf")
    x[10], x[11] = 1e-31, 1e-30  # below and above the smallest size that counts
    x[12, 1], x[13] = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    found = answers_at(level, BODY, [call_of(x, weight)], tmp_path)[0]
    assert same(found, linear_int8_reference(x, *weight, None))
    assert found[[3, 7, 8]].isnan().all() and not found[[0, 1, 2, 4, 5, 6, 9, 10, 11, 13]].isnan().any()
    assert not found[10].any() and not found[13].any() and found[11].any()


def test_halves_are_rounded_to_even(level, tmp_path):
    """The largest is 127, so the scale is 1 and x is rounded as it is."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997]])
    weight = torch.eye(8, dtype=torch.int8), torch.ones(8)
    found = answers_at(level, BODY, [call_of(x, weight)], tmp_path)[0]
    assert found.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0]]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_what_was_packed_comes_back(outputs, inputs):
    weight = weight_of(outputs, inputs)
    numbers, scales = unpack_int8(pack_int8(*weight), outputs, inputs)
    assert torch.equal(numbers, weight[0]) and torch.equal(scales, weight[1])


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_are_packed_as_the_reference_tells(outputs, inputs):
    numbers, scales = weight_of(outputs, inputs)
    apart = torch.cat([numbers, numbers], dim=1)[:, :inputs], scales.repeat_interleave(2)[::2]
    for weight in ((numbers, scales), apart):
        assert torch.equal(pack_int8(*weight), pack_int8_reference(*weight))


def test_several_threads_give_the_answer_of_one():
    weight, x = weight_of(3000, 640), draw(40, 640)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(linear_int8(*call_of(x, weight)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def arguments(**changed):
    return {
        "x": draw(2, 8),
        "packed": pack_int8(*weight_of(40, 8)),
        "bias": None,
        "out": torch.empty(2, 40),
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": draw(2, 9)}, "use pack_int8"),
        ({"out": torch.empty(2, 65)}, "use pack_int8"),
        ({"out": torch.empty(3, 40)}, "out has 3 rows, and x has 2"),
        ({"out": torch.empty(2, 40).bfloat16()}, "out has the dtype of x"),
        ({"packed": pack_int8(*weight_of(40, 8)).view(torch.int8)}, "packed weight is uint8"),
        ({"bias": torch.ones(39)}, r"bias is \[outputs\]"),
        ({"x": draw(8, 2).t()}, "side by side"),
        ({"x": draw(2, 8).half()}, "float32 and bfloat16 are served"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(RuntimeError, match=said):
        linear_int8(**arguments(**changed))


def test_a_weight_of_other_types_is_not_packed():
    with pytest.raises(ValueError, match="numbers are int8"):
        pack_int8(torch.zeros(4, 8), torch.ones(4))
    with pytest.raises(
        ValueError, match=r"scales float32 \[outputs\], got torch.int8 \(4, 8\) and torch.float32 \(3,\)"
    ):
        pack_int8(torch.zeros(4, 8, dtype=torch.int8), torch.ones(3))


def test_the_operators_keep_torchs_rules():
    torch.library.opcheck(torch.ops.sgl_kernel.linear_int8.default, tuple(arguments().values()))
    weight = weight_of(40, 9)
    torch.library.opcheck(torch.ops.sgl_kernel.pack_int8.default, (*weight, pack_int8(*weight)))

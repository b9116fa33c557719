"""Linear layers over packed weights against their references, at every instruction set of this processor."""

import pytest
import torch
from isa_levels import answers_at, levels_to_test

from sgl_kernel.linear import (
    BlockForm,
    BlockWeight,
    linear_blocks,
    linear_blocks_reference,
    linear_packed,
    pack_blocks,
    pack_blocks_reference,
    pack_panels,
    pack_panels_reference,
    quantized_rows,
    unpack_blocks,
    unpack_panels,
)

#: Rows around the sizes of a block of rows (4, 6, 8, 12), and more than are taken at once (192).
ROWS = (0, 1, 2, 5, 6, 7, 9, 13, 25, 200)
#: (outputs, inputs): around a panel, a group and a pair, a model's, a single number, and none.
SHAPES = ((576, 192), (33, 47), (100, 7), (1, 1), (31, 64), (64, 0))
BLOCK_SHAPES = ((576, 192), (33, 64), (1, 32), (15, 96), (48, 320))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

FLOAT_BODY = """
from sgl_kernel.linear import linear_packed
for x, packed, bias, out in cases:
    answers.append(linear_packed(x, packed, bias, out))
"""
BLOCK_BODY = """
from sgl_kernel.linear import linear_blocks
for x, packed, bias, out, form in cases:
    answers.append(linear_blocks(x, packed, bias, out, form))
"""


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def float_cases(dtype):
    """(x, weight, bias), x also as a part of wider rows."""
    cases = []
    for seed, (outputs, inputs) in enumerate(SHAPES):
        weight = draw(outputs, inputs, dtype=dtype, seed=seed)
        for rows in ROWS:
            x = draw(rows, inputs + 3, dtype=dtype, seed=rows)
            x = x[:, 1 : inputs + 1] if rows % 2 else x[:, :inputs].contiguous()
            cases.append((x, weight, draw(outputs, dtype=dtype, seed=9) if rows % 3 else None))
    return cases


def exact(x, weight, bias):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_near(found, wanted, sizes):
    """Within the rounding of float32 sums of so many products, and one step of the answer's type."""
    step = 2**-8 if found.dtype == torch.bfloat16 else 2**-22
    room = step * wanted.abs() + 2**-20 * sizes
    assert ((found.double() - wanted).abs() <= room + 1e-12).all()


def products(x, weight):
    """What each sum would be if nothing cancelled: the scale of its rounding."""
    return x.double().abs() @ weight.double().abs().T + 1.0


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_packed_products_equal_the_reference(level, dtype, tmp_path):
    cases = float_cases(dtype)
    calls = [
        (x, pack_panels(weight), bias, torch.full((x.shape[0], weight.shape[0]), 7.0, dtype=dtype))
        for x, weight, bias in cases
    ]
    for (x, weight, bias), found in zip(cases, answers_at(level, FLOAT_BODY, calls, tmp_path), strict=True):
        assert_near(found, exact(x, weight, bias), products(x, weight))


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(level, dtype, tmp_path):
    """What makes an answer independent of its neighbours, of chunks and of what a draft proposes."""
    weight, x = draw(600, 193, dtype=dtype), draw(200, 193, dtype=dtype, seed=1)
    packed = pack_panels(weight)
    parts = [x, *[x[i : i + size] for size in (1, 2, 7, 12) for i in (0, 13, 180)]]
    calls = [(part, packed, None, torch.empty(part.shape[0], 600, dtype=dtype)) for part in parts]
    whole, *pieces = answers_at(level, FLOAT_BODY, calls, tmp_path)
    places = [(i, size) for size in (1, 2, 7, 12) for i in (0, 13, 180)]
    for (first, size), piece in zip(places, pieces, strict=True):
        assert torch.equal(piece, whole[first : first + size])


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_what_was_packed_comes_back(dtype):
    for seed, (outputs, inputs) in enumerate(SHAPES):
        weight = draw(outputs, inputs, dtype=dtype, seed=seed)
        assert torch.equal(unpack_panels(pack_panels(weight), outputs, inputs), weight)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_panels_are_packed_as_the_reference_tells(dtype):
    for outputs, inputs in SHAPES:
        wide = draw(outputs, inputs + 3, dtype=dtype)
        turned = draw(inputs, outputs, dtype=dtype).t()
        for weight in (wide[:, :inputs].contiguous(), wide[:, 2 : inputs + 2], turned):
            assert torch.equal(pack_panels(weight), pack_panels_reference(weight))


@pytest.mark.parametrize("form", BlockForm, ids=[form.name for form in BlockForm])
def test_blocks_are_packed_as_the_reference_tells(form):
    for outputs, inputs in BLOCK_SHAPES:
        weight = block_weight(form, outputs, inputs)
        apart = BlockWeight(
            form,
            torch.cat([weight.numbers, weight.numbers], dim=1)[:, :inputs],
            weight.scales.t().contiguous().t(),
            weight.minima,
        )
        for some in (weight, apart):
            assert torch.equal(pack_blocks(some), pack_blocks_reference(some))


def block_weight(form, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(form.lowest, form.highest + 1, (outputs, inputs), generator=generator)
    numbers = drawn.to(torch.int8)
    numbers[0], numbers[-1] = form.lowest, form.highest  # the largest sums that a block can have
    scales = torch.randn(outputs, inputs // 32 * form.scales, generator=generator).half() * 0.1
    minima = torch.randn(outputs, inputs // 32, generator=generator).half() * 0.1
    scales[0, 0] = 3e-7  # below the normal numbers of a half float
    return BlockWeight(form, numbers, scales, minima if form.has_minimum else None)


@pytest.mark.parametrize("form", BlockForm, ids=[form.name for form in BlockForm])
def test_a_record_is_as_large_as_its_parts(form):
    """The size that the kernels say, against what the reference writes and what the form means."""
    packed = pack_blocks_reference(block_weight(form, 16, 32))
    halves = form.scales + form.has_minimum
    assert packed.numel() == 16 * 32 * form.bits // 8 + 16 * 2 * halves
    assert torch.ops.sgl_kernel.block_record_bytes(int(form)) == packed.numel()


def test_no_form_stands_behind_the_last_one():
    behind = max(BlockForm) + 1
    with pytest.raises(RuntimeError, match=f"form is 0 to {behind - 1}, got {behind}"):
        torch.ops.sgl_kernel.block_record_bytes(behind)


@pytest.mark.parametrize("form", BlockForm, ids=[form.name for form in BlockForm])
def test_what_was_packed_as_blocks_comes_back(form):
    for outputs, inputs in BLOCK_SHAPES:
        weight = block_weight(form, outputs, inputs)
        found = unpack_blocks(pack_blocks(weight), form, outputs)
        assert found.form is form and torch.equal(found.numbers, weight.numbers)
        assert torch.equal(found.scales, weight.scales)
        assert (found.minima is None) == (weight.minima is None)
        assert found.minima is None or torch.equal(found.minima, weight.minima)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("form", BlockForm, ids=[form.name for form in BlockForm])
def test_products_with_quantized_blocks_equal_the_reference(level, form, dtype, tmp_path):
    cases = []
    for seed, (outputs, inputs) in enumerate(BLOCK_SHAPES):
        weight = block_weight(form, outputs, inputs, seed)
        for rows in ROWS:
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            x[: rows // 4] = 0
            x[rows // 2 :, :32] = 100.0  # all of a block at the end of its range
            cases.append((x, weight, draw(outputs, dtype=dtype) if rows % 2 else None))
    calls = [
        (x, pack_blocks(weight), bias, torch.full((len(x), len(weight.numbers)), 7.0, dtype=dtype), form)
        for x, weight, bias in cases
    ]
    found = answers_at(level, BLOCK_BODY, calls, tmp_path)
    for (x, weight, bias), answer in zip(cases, found, strict=True):
        wanted = linear_blocks_reference(x.float(), weight, None if bias is None else bias.float())
        assert_near(answer, wanted.double(), products(x, weight.dequantized()))


@pytest.mark.parametrize("form", BlockForm, ids=[form.name for form in BlockForm])
def test_a_row_of_blocks_gives_the_same_bits_alone_and_in_a_batch(level, form, tmp_path):
    weight, x = block_weight(form, 100, 320), draw(200, 320)
    packed = pack_blocks(weight)
    parts = [x, x[:1], x[7:9], x[180:199]]
    calls = [(part, packed, None, torch.empty(len(part), 100), form) for part in parts]
    whole, *pieces = answers_at(level, BLOCK_BODY, calls, tmp_path)
    assert all(
        torch.equal(piece, part)
        for piece, part in zip(pieces, (whole[:1], whole[7:9], whole[180:199]), strict=True)
    )


def test_a_block_that_is_not_finite_makes_its_row_nan_and_no_other(level, tmp_path):
    x, weight = draw(19, 96), block_weight(BlockForm.Q4_MIN, 33, 96)
    x[3, 5], x[8, 40], x[18, 95] = float("nan"), float("inf"), float("-inf")
    call = (x, pack_blocks(weight), None, torch.empty(19, 33), weight.form)
    (found,) = answers_at(level, BLOCK_BODY, [call], tmp_path)
    is_bad = torch.tensor([row in (3, 8, 18) for row in range(19)])
    assert found[is_bad].isnan().all() and found[~is_bad].isfinite().all()


def test_a_block_too_small_to_be_scaled_counts_as_zeros(level, tmp_path):
    weight = block_weight(BlockForm.Q5_MIN, 33, 64)
    x = draw(2, 64)
    tiny, zeros = x.clone(), x.clone()
    tiny[:, :32], zeros[:, :32] = 2.0**-122, 0.0
    calls = [(part, pack_blocks(weight), None, torch.empty(2, 33), weight.form) for part in (tiny, zeros)]
    assert torch.equal(*answers_at(level, BLOCK_BODY, calls, tmp_path))


def test_numbers_half_way_are_rounded_to_even(level, tmp_path):
    """All weights are 1 and the largest input is 127: an output is the sum of the rounded inputs."""
    numbers = torch.ones(16, 32, dtype=torch.int8)
    weight = BlockWeight(BlockForm.Q8, numbers, torch.ones(16, 1).half())
    x = torch.zeros(3, 32)
    x[:, 0] = 127.0
    x[0, 1], x[1, 1], x[2, 1] = 0.5, 1.5, -2.5
    call = (x, pack_blocks(weight), None, torch.empty(3, 16), weight.form)
    assert answers_at(level, BLOCK_BODY, [call], tmp_path)[0][:, 0].tolist() == [127.0, 129.0, 125.0]


def test_the_levels_agree_on_quantized_products_but_for_the_rounding_of_their_sums(tmp_path):
    """Whole numbers are exact at every level; a saturating one would be off by far more than this."""
    x = draw(5, 320) * 50
    weights = [block_weight(form, 64, 320) for form in BlockForm]
    calls = [(x, pack_blocks(weight), None, torch.empty(5, 64), weight.form) for weight in weights]
    answers = [torch.stack(answers_at(found, BLOCK_BODY, calls, tmp_path)) for found in levels_to_test()]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-5, atol=1e-3)


def test_each_half_of_a_block_of_six_bits_has_its_scale():
    """One block: 2 and -32 with scale 0.5, 3 and 31 with scale 4; x is 127 or 1 at each."""
    numbers = torch.zeros(1, 32, dtype=torch.int8)
    numbers[0, :2], numbers[0, 16:18] = torch.tensor([2, -32]), torch.tensor([3, 31])
    weight = BlockWeight(BlockForm.Q6, numbers, torch.tensor([[0.5, 4.0]]).half())
    x = torch.zeros(1, 32)
    x[0, :2], x[0, 16:18] = torch.tensor([127.0, 1.0]), torch.tensor([127.0, 1.0])
    wanted = 0.5 * (2 * 127 - 32) + 4 * (3 * 127 + 31)
    assert linear_blocks_reference(x, weight, None).tolist() == [[wanted]]
    assert linear_blocks(x, pack_blocks(weight), None, torch.empty(1, 1), weight.form).tolist() == [[wanted]]


def test_a_part_of_wider_rows_takes_its_outputs_and_no_other():
    """Parts of a layer in several forms write beside each other."""
    weight, x, wide = block_weight(BlockForm.Q6, 40, 64), draw(19, 64), torch.full((19, 60), 7.0)
    linear_blocks(x, pack_blocks(weight), None, wide[:, 10:50], weight.form)
    alone = linear_blocks(x, pack_blocks(weight), None, torch.empty(19, 40), weight.form)
    assert torch.equal(wide[:, 10:50], alone)
    assert (wide[:, :10] == 7).all() and (wide[:, 50:] == 7).all()


def test_the_reference_of_blocks_is_arithmetic():
    """One block: numbers 2 and -3 with scale 0.5, minimum 0.25; x is 127 and 1 behind zeros."""
    numbers = torch.zeros(1, 32, dtype=torch.int8)
    numbers[0, 0], numbers[0, 31] = 2, 3
    weight = BlockWeight(
        BlockForm.Q4_MIN, numbers, torch.tensor([[0.5]]).half(), torch.tensor([[0.25]]).half()
    )
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 31] = 127.0, 1.0
    assert linear_blocks_reference(x, weight, None).tolist() == [[127 * 1.25 + 1.75]]
    assert quantized_rows(torch.zeros(1, 32))[1].tolist() == [[0.0]]


def test_several_threads_give_the_answer_of_one():
    weight, x = draw(3000, 640), draw(40, 640)
    packed, blocks = pack_panels(weight), block_weight(BlockForm.Q4_MIN, 3000, 640)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs = torch.empty(2, 40, 3000)
            linear_packed(x, packed, None, outs[0])
            linear_blocks(x, pack_blocks(blocks), None, outs[1], blocks.form)
            found.append(outs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_numbers_that_are_not_finite_stay_in_their_row():
    x = draw(14, 64)
    x[3, 5] = float("nan")
    out = linear_packed(x, pack_panels(draw(40, 64)), None, torch.empty(14, 40))
    assert out[3].isnan().all() and out[[i for i in range(14) if i != 3]].isfinite().all()


def arguments(**changed):
    weight = pack_panels(draw(40, 8))
    return {"x": draw(2, 8), "packed": weight, "bias": None, "out": torch.empty(2, 40), **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": draw(2, 9)}, "use pack_panels"),
        ({"out": torch.empty(2, 65)}, "use pack_panels"),
        ({"out": torch.empty(3, 40)}, "out has 3 rows, and x has 2"),
        ({"out": torch.empty(2, 40).bfloat16()}, "out has the dtype of x"),
        ({"packed": pack_panels(draw(40, 8)).double()}, "weight has another dtype"),
        ({"bias": torch.ones(39)}, r"bias is \[outputs\]"),
        ({"bias": torch.ones(40).bfloat16()}, "bias has another dtype"),
        ({"x": draw(8, 2).t()}, "side by side"),
        (
            {"x": draw(2, 8).half(), "packed": pack_panels(draw(40, 8)).half()},
            "use pack_panels|no other dtype",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(RuntimeError, match=said):
        linear_packed(**arguments(**changed))


def test_blocks_that_do_not_fit_are_refused():
    weight = block_weight(BlockForm.Q4, 40, 64)
    packed = pack_blocks(weight)
    with pytest.raises(RuntimeError, match="use pack_blocks"):
        linear_blocks(draw(2, 64), packed, None, torch.empty(2, 40), BlockForm.Q8)
    with pytest.raises(RuntimeError, match="form is 0 to 5, got 6"):
        torch.ops.sgl_kernel.linear_blocks(draw(2, 64), packed, None, torch.empty(2, 40), 6)
    with pytest.raises(ValueError, match="a multiple of 32 inputs, and this one has 40"):
        pack_blocks(BlockWeight(BlockForm.Q4, torch.zeros(4, 40, dtype=torch.int8), torch.zeros(4, 1)))


def test_weights_that_no_form_takes_are_not_packed():
    with pytest.raises(RuntimeError, match="float32 and bfloat16 are served"):
        pack_panels(draw(4, 8).half())
    with pytest.raises(RuntimeError, match="out takes 1024 bytes, and has 512"):
        torch.ops.sgl_kernel.pack_panels(draw(4, 8), torch.empty(128))
    numbers, scales = torch.zeros(4, 32, dtype=torch.int8), torch.zeros(4, 1).half()
    with pytest.raises(RuntimeError, match="form 1 has minima, and none are given"):
        pack_blocks(BlockWeight(BlockForm.Q4_MIN, numbers, scales))
    with pytest.raises(RuntimeError, match="form 0 has no minima, and some are given"):
        pack_blocks(BlockWeight(BlockForm.Q4, numbers, scales, scales))
    with pytest.raises(RuntimeError, match=r"scales is float16 \[4, 1\]"):
        pack_blocks(BlockWeight(BlockForm.Q4, numbers, scales[:3]))
    with pytest.raises(RuntimeError, match=r"scales is float16 \[4, 2\]"):
        pack_blocks(BlockWeight(BlockForm.Q6, numbers, scales))
    with pytest.raises(RuntimeError, match=r"minima is float16 \[4, 1\]"):
        pack_blocks(BlockWeight(BlockForm.Q5_MIN, numbers, scales, scales.float()))
    with pytest.raises(RuntimeError, match="numbers is int8"):
        pack_blocks(BlockWeight(BlockForm.Q4, numbers.int(), scales))


def test_the_operators_keep_torchs_rules():
    torch.library.opcheck(torch.ops.sgl_kernel.linear_packed.default, tuple(arguments().values()))
    weight = block_weight(BlockForm.Q5_MIN, 40, 64)
    torch.library.opcheck(
        torch.ops.sgl_kernel.linear_blocks.default,
        (draw(2, 64), pack_blocks(weight), torch.ones(40), torch.empty(2, 40), int(weight.form)),
    )
    torch.library.opcheck(torch.ops.sgl_kernel.pack_panels.default, (draw(33, 8), torch.empty(2, 8, 32, 1)))
    torch.library.opcheck(
        torch.ops.sgl_kernel.pack_blocks.default,
        (weight.numbers, weight.scales, weight.minima, pack_blocks(weight), int(weight.form)),
    )

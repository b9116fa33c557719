"""Mixtures of experts against their reference, at every instruction set."""

import functools

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.linear_int8 import linear_int8_reference
from sgl_kernel.moe import (
    PackedExperts,
    fused_experts,
    fused_experts_reference,
    pack_experts,
    pack_experts_int8,
)
from sgl_kernel.record import CallList

TYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 2e-2)}
#: (experts, in, intermediate size, outputs, experts of a row): a model's, odd ones, and the smallest.
SHAPES = ((8, 64, 96, 64, 2), (5, 33, 7, 50, 3), (1, 1, 1, 1, 1), (60, 32, 16, 32, 4))
ROWS = (0, 1, 2, 13, 40)

BODY = """
from sgl_kernel.moe import fused_experts
for x, experts, weights, ids, out in cases:
    answers.append(fused_experts(x, experts, weights, ids, out))
"""


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class FloatExperts:
    """Weights of some experts as they are, and packed."""

    def __init__(self, experts, inputs, inner, outputs, dtype=torch.float32, seed=0):
        self.outputs = outputs
        self.gate_up = draw(experts, 2 * inner, inputs, dtype=dtype, seed=seed) * inputs**-0.5
        self.down = draw(experts, outputs, inner, dtype=dtype, seed=seed + 1) * inner**-0.5
        self.packed = pack_experts(self.gate_up, self.down)

    def multiply(self, weight, expert, rows):
        return rows.float() @ weight[expert].float().T

    def reference(self, x, weights, ids):
        gate_up, down = (functools.partial(self.multiply, weight) for weight in (self.gate_up, self.down))
        return fused_experts_reference(x, gate_up, down, weights, ids, self.outputs)


class Int8Experts(FloatExperts):
    def __init__(self, experts, inputs, inner, outputs, dtype=torch.float32, seed=0):
        self.outputs = outputs
        self.gate_up = self.weight(experts, 2 * inner, inputs, seed)
        self.down = self.weight(experts, outputs, inner, seed + 1)
        self.packed = pack_experts_int8(self.gate_up, self.down)

    def weight(self, experts, outputs, inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-127, 128, (experts, outputs, inputs), dtype=torch.int8, generator=generator)
        return numbers, torch.rand(experts, outputs, generator=generator) * 0.02 * inputs**-0.5

    def multiply(self, weight, expert, rows):
        return linear_int8_reference(rows.float(), weight[0][expert], weight[1][expert], None)


KINDS = {"panels": FloatExperts, "int8": Int8Experts}


def router(rows, experts, top, seed=0):
    """Different experts for each row, not all of them in use, and here and there one that lies elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    used = max(top, experts - 2)
    scores = torch.rand(rows, used, generator=generator)
    weights, ids = scores.topk(top, dim=1)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return weights.contiguous(), ids.contiguous()


def call_of(experts, x, weights, ids):
    """Arguments of the kernel; out is a part of wider rows."""
    out = torch.full((len(x), experts.outputs + 5), 7.0, dtype=x.dtype)[:, 2:-3]
    return x, experts.packed, weights, ids, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_mixture_equals_the_reference(level, dtype, kind, tmp_path):
    """Odd sizes, rows in wider ones, experts without a row, and no row at all."""
    type_, tolerance = TYPES[dtype]
    cases = []
    for seed, (num, inputs, inner, outputs, top) in enumerate(SHAPES):
        experts = KINDS[kind](num, inputs, inner, outputs, type_, seed)
        for rows in ROWS:
            x = draw(rows, inputs + 3, dtype=type_, seed=rows)[:, 1 : inputs + 1]
            cases.append((experts, x, *router(rows, num, top, seed)))
    found = answers_at(level, BODY, [call_of(*case) for case in cases], tmp_path)
    for (experts, *case), answer in zip(cases, found, strict=True):
        wanted = experts.reference(*case)
        # The gate is rounded where one of int8 may fall to the other side of a half: one step of the scale.
        room = tolerance if kind == "panels" else max(tolerance, 2e-2)
        torch.testing.assert_close(answer.float(), wanted.float(), rtol=room, atol=room)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(level, dtype, kind, tmp_path):
    """More pairs than are computed together, and experts with many rows and with few."""
    type_, _ = TYPES[dtype]
    experts = KINDS[kind](6, 33, 20, 41, type_)
    x, (weights, ids) = draw(1400, 33, dtype=type_), router(1400, 6, 3)
    ids[:, 0] = torch.where(ids[:, 0] >= 0, 5, -1)
    places = [(0, 1), (3, 2), (690, 17), (1365, 4), (1399, 1)]
    parts = [slice(first, first + size) for first, size in places]
    calls = [call_of(experts, x[part], weights[part], ids[part]) for part in (slice(None), *parts)]
    whole, *pieces = answers_at(level, BODY, calls, tmp_path)
    for part, piece in zip(parts, pieces, strict=True):
        assert torch.equal(piece, whole[part])


def test_a_row_without_an_expert_gives_zeros_and_one_that_is_not_finite_harms_no_other(level, tmp_path):
    experts = FloatExperts(4, 24, 8, 10)
    x, (weights, ids) = draw(5, 24), router(5, 4, 2, seed=3)
    ids[:] = torch.tensor([[0, 1], [-1, -1], [0, 1], [1, 0], [2, 3]])
    x[2, 3] = float("nan")
    (found,) = answers_at(level, BODY, [call_of(experts, x, weights, ids)], tmp_path)
    assert not found[1].any() and found[2].isnan().all()
    torch.testing.assert_close(found[[0, 3, 4]], experts.reference(x, weights, ids)[[0, 3, 4]])


def test_the_reference_is_arithmetic():
    """Two experts of one number: 3 * silu(2 x) * x of the first, silu(x) * x of the second."""
    weights = {0: (2.0, 1.0, 3.0), 1: (1.0, 1.0, 1.0)}

    def gate_up(expert, rows):
        return rows * torch.tensor(weights[expert][:2])

    def down(expert, rows):
        return rows * weights[expert][2]

    x = torch.tensor([[0.5]])
    share, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 0]])
    silu = torch.nn.functional.silu
    wanted = 0.25 * silu(x) * x + 0.75 * 3 * silu(2 * x) * x
    torch.testing.assert_close(fused_experts_reference(x, gate_up, down, share, ids, 1), wanted)


def test_several_threads_give_the_answer_of_one():
    before = torch.get_num_threads()
    try:
        for experts in (FloatExperts(8, 256, 192, 256), Int8Experts(8, 256, 192, 256)):
            x, (weights, ids) = draw(300, 256), router(300, 8, 2)
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found += [
                    fused_experts(*call_of(experts, x[:rows], weights[:rows], ids[:rows]))
                    for rows in (1, 300)
                ]
            assert torch.equal(found[1], found[3]) and torch.equal(found[1], found[5])
            assert torch.equal(found[0], found[2]) and torch.equal(found[0], found[4])
    finally:
        torch.set_num_threads(before)


def test_a_recorded_mixture_follows_a_router_that_chooses_anew():
    experts = FloatExperts(6, 32, 16, 32)
    x, (weights, ids) = draw(7, 32), router(7, 6, 2)
    out, calls = torch.empty(7, 32), CallList()
    with calls.recording():
        fused_experts(x, experts.packed, weights, ids, out)
    ids.copy_(router(7, 6, 2, seed=1)[1])
    x.neg_()
    calls.play()
    torch.testing.assert_close(out, experts.reference(x, weights, ids), rtol=2e-5, atol=2e-5)


def arguments(**changed):
    experts = FloatExperts(3, 8, 6, 10).packed
    weights, ids = router(2, 3, 2)
    return {"x": draw(2, 8), "experts": experts, "topk_weights": weights, "topk_ids": ids.clamp(min=0)} | {
        "out": torch.empty(2, 10),
        **changed,
    }


def resized(size):
    packed = FloatExperts(3, 8, 6, 10).packed
    return PackedExperts(packed.gate_up, packed.down, size)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": draw(2, 9)}, "use pack_experts"),
        ({"out": torch.empty(2, 65)}, "use pack_experts"),
        ({"experts": resized(5)}, "intermediate_size 5 and out; use pack_experts"),
        ({"out": torch.empty(3, 10)}, r"out \[rows, outputs\]"),
        ({"out": torch.empty(2, 10).bfloat16()}, "of its dtype"),
        ({"experts": FloatExperts(3, 8, 6, 10, torch.bfloat16).packed}, "the dtype of x, or are uint8"),
        ({"x": draw(8, 2).t()}, "side by side"),
        ({"topk_ids": torch.tensor([[0, 1], [3, 0]])}, "topk_ids are -1 to 2, got 3"),
        ({"topk_ids": torch.tensor([[0, 1], [-2, 0]])}, "topk_ids are -1 to 2, got -2"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, "topk_ids int64"),
        ({"topk_weights": torch.ones(2, 3)}, r"topk_weights is contiguous float32 \[rows, top\]"),
        ({"x": draw(2, 8).half(), "out": torch.empty(2, 10).half()}, "float32 and bfloat16 are served"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(RuntimeError, match=said):
        fused_experts(**arguments(**changed))


def test_a_mixture_of_no_expert_is_refused():
    with pytest.raises(ValueError, match="one expert at least"):
        pack_experts(torch.empty(0, 4, 8), torch.empty(0, 8, 2))


def test_the_operator_keeps_torchs_rules():
    given = arguments()
    experts = given["experts"]
    weights = (experts.gate_up, experts.down, experts.intermediate_size)
    call = (given["x"], *weights, given["topk_weights"], given["topk_ids"], given["out"])
    torch.library.opcheck(torch.ops.sgl_kernel.fused_experts.default, call)

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.unquant import (
    BagForm,
    PackedForm,
    RowMajorForm,
    SplitRowsForm,
    TransposedForm,
    UnquantizedConfig,
    stored_form,
)
from sglang.test.test_utils import published_topology
from sglang.test.weight_items import fill

FORMS = [RowMajorForm(), PackedForm()]
# What a 16-bit type may be off by: its own rounding of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
        yield


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 2, 16, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_every_form_multiplies_like_the_plain_product_in_double(form, dtype, rows, bias):
    weight, x = random(96, 64, dtype=dtype), random(rows, 64, dtype=dtype, seed=1)
    offset = random(96, dtype=dtype, seed=2) if bias else None
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    out = form.apply(form.pack(weight), x, offset)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_unpack_gives_every_bit_back(form, dtype):
    weight = random(50, 33, dtype=dtype)
    assert torch.equal(form.unpack(form.pack(weight), dtype), weight)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "form", [TransposedForm(), SplitRowsForm(), BagForm()], ids=lambda form: type(form).__name__
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_forms_for_single_rows_multiply_and_unpack(two_threads, form, dtype):
    weight, x, bias = (
        random(192, 40, dtype=dtype),
        random(1, 40, dtype=dtype, seed=1),
        random(192, dtype=dtype),
    )
    state = form.pack(weight)
    assert torch.equal(form.unpack(state, dtype), weight)
    for offset in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        out = form.apply(state, x, offset)
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    "dtype, rows, threads, expected",
    [
        (torch.float32, 128, 1, TransposedForm),
        (torch.float32, 128, 2, SplitRowsForm),
        (torch.float32, 127, 2, TransposedForm),  # does not divide among the threads
        (torch.bfloat16, 128, 2, BagForm),
        (torch.bfloat16, 100, 2, type(None)),  # does not divide into bags
        (torch.float32, 256, 2, type(None)),  # too large for a second form
        (torch.bfloat16, 256, 2, BagForm),
    ],
)
def test_a_packed_weight_keeps_a_form_for_single_rows_where_it_pays(
    monkeypatch, dtype, rows, threads, expected
):
    monkeypatch.setattr(unquant, "_SINGLE_ROW_BYTES", 128 * 64 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight, x = random(rows, 64, dtype=dtype), random(1, 64, dtype=dtype, seed=1)
    state = PackedForm().pack(weight)
    assert isinstance(state.single, expected)
    out = PackedForm().apply(state, x, None)
    wide = F.linear(x.double(), weight.double())
    assert (out.double() - wide).abs().max() < TOLERANCE[dtype] * wide.abs().max()


def test_16_bit_weights_are_widened_only_where_the_processor_cannot_multiply_them(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(unquant, "cpu_has_bf16", lambda: True)
    assert isinstance(stored_form(torch.bfloat16, cpu), RowMajorForm)
    monkeypatch.setattr(unquant, "cpu_has_bf16", lambda: False)
    assert isinstance(stored_form(torch.bfloat16, cpu), PackedForm)
    assert isinstance(stored_form(torch.bfloat16, torch.device("cuda")), RowMajorForm)


def test_a_layer_packs_itself_when_its_last_part_arrives_and_gives_up_the_plain_weight():
    layer = ColumnParallelLinear(
        8, [("a", 4), ("b", 6)], method=UnquantizedConfig().linear_method(""), dtype=torch.float32
    )
    assert layer.stored is None
    parts = {"a.weight": random(4, 8), "b.weight": random(6, 8, seed=1)}
    fill(layer.parameters(), parts)
    assert layer.weight.numel() == 0
    assert torch.equal(layer.method.unpack(layer), torch.cat(list(parts.values())))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_two_takes_its_own_slice(rank):
    """Column layers cut every part of a fused weight for itself; row layers cut input features."""
    two = {"tp_size": 2, "ranks": {"world_rank": rank, "dp_rank": None}}
    a, b, wide = random(4, 8), random(6, 8, seed=1), random(5, 8, seed=2)
    bias_a, bias_b = random(4, seed=3), random(6, seed=4)
    with published_topology(**two):
        method = UnquantizedConfig().linear_method
        column = ColumnParallelLinear(
            8, [("a", 4), ("b", 6)], method=method(""), dtype=torch.float32, bias=True
        )
        row = RowParallelLinear("w", 8, 5, method=method(""), dtype=torch.float32)
    fill(column.parameters(), {"a.weight": a, "b.weight": b, "a.bias": bias_a, "b.bias": bias_b})
    fill(row.parameters(), {"w.weight": wide})
    mine = torch.cat((a[2 * rank : 2 * rank + 2], b[3 * rank : 3 * rank + 3]))
    assert torch.equal(column.method.unpack(column), mine)
    assert torch.equal(
        column.bias.data, torch.cat((bias_a[2 * rank : 2 * rank + 2], bias_b[3 * rank : 3 * rank + 3]))
    )
    assert torch.equal(row.method.unpack(row), wide[:, 4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("out", [1, 7, 51])
@pytest.mark.parametrize("bias", [False, True])
def test_no_rows_and_odd_widths_are_no_exception(form, dtype, out, bias):
    """An idle replica brings no rows, and a share that is rounded up has any width."""
    weight, offset = random(out, 33, dtype=dtype), random(out, dtype=dtype) if bias else None
    state = form.pack(weight)
    empty = form.apply(state, random(0, 33, dtype=dtype), offset)
    assert (empty.shape, empty.dtype) == ((0, out), dtype)
    for rows in (1, 3):
        x = random(rows, 33, dtype=dtype, seed=1)
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        got = form.apply(state, x, offset)
        assert (got.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max().clamp(min=1)

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pytest
import torch
import torch.nn.functional as F

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization import stored_forms
from sglang.srt.layers.quantization.stored_forms import (
    BagWeight,
    PackedWeight,
    PanelWeight,
    RowMajorWeight,
    SplitRowsWeight,
    TransposedWeight,
    fastest_form,
)
from sglang.srt.layers.quantization.unquant import UnquantizedConfig
from sglang.test.test_utils import published_topology
from sglang.test.weight_items import fill

FORMS = [RowMajorWeight, PackedWeight, PanelWeight]
# What a 16-bit type may be off by: its own rounding of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def skip_what_is_not_there(form, dtype):
    if form is not PanelWeight:
        return
    if compiled_kernels() is None:
        pytest.skip("sgl_kernel is not installed, or switched off")
    if dtype == torch.float16:
        pytest.skip("the kernels serve float32 and bfloat16")


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
        yield


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 2, 16, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_every_form_multiplies_like_the_plain_product_in_double(form, dtype, rows, bias):
    skip_what_is_not_there(form, dtype)
    weight, x = random(96, 64, dtype=dtype), random(rows, 64, dtype=dtype, seed=1)
    offset = random(96, dtype=dtype, seed=2) if bias else None
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    out = form(weight).apply(x, offset)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_unpack_gives_every_bit_back(form, dtype):
    skip_what_is_not_there(form, dtype)
    weight = random(50, 33, dtype=dtype)
    assert torch.equal(form(weight).unpack(), weight)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "form", [TransposedWeight, SplitRowsWeight, BagWeight], ids=lambda form: form.__name__
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_forms_for_single_rows_multiply_and_unpack(two_threads, form, dtype):
    weight, x, bias = (
        random(192, 40, dtype=dtype),
        random(1, 40, dtype=dtype, seed=1),
        random(192, dtype=dtype),
    )
    stored = form(weight)
    assert torch.equal(stored.unpack(), weight)
    for offset in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        out = stored.apply(x, offset)
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    "dtype, rows, threads, expected",
    [
        (torch.float32, 128, 1, TransposedWeight),
        (torch.float32, 128, 2, SplitRowsWeight),
        (torch.float32, 127, 2, TransposedWeight),  # does not divide among the threads
        (torch.bfloat16, 128, 2, BagWeight),
        (torch.bfloat16, 100, 2, type(None)),  # does not divide into bags
        (torch.float32, 256, 2, type(None)),  # too large for a second form
        (torch.bfloat16, 256, 2, BagWeight),
    ],
)
def test_a_packed_weight_keeps_a_form_for_single_rows_where_it_pays(
    monkeypatch, dtype, rows, threads, expected
):
    monkeypatch.setattr(stored_forms, "_SINGLE_ROW_BYTES", 128 * 64 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight, x = random(rows, 64, dtype=dtype), random(1, 64, dtype=dtype, seed=1)
    stored = PackedWeight(weight)
    assert isinstance(stored.single, expected)
    out = stored.apply(x, None)
    wide = F.linear(x.double(), weight.double())
    assert (out.double() - wide).abs().max() < TOLERANCE[dtype] * wide.abs().max()


def test_16_bit_weights_are_widened_only_where_the_processor_cannot_multiply_them(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(stored_forms, "compiled_kernels", lambda: None)
    monkeypatch.setattr(stored_forms, "cpu_has_bf16", lambda: True)
    assert fastest_form(torch.bfloat16, cpu) is RowMajorWeight
    monkeypatch.setattr(stored_forms, "cpu_has_bf16", lambda: False)
    assert fastest_form(torch.bfloat16, cpu) is PackedWeight
    assert fastest_form(torch.bfloat16, torch.device("cuda")) is RowMajorWeight


def test_compiled_kernels_multiply_what_they_serve_where_they_are(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(stored_forms, "compiled_kernels", lambda: pytest)  # any module
    assert fastest_form(torch.bfloat16, cpu) is fastest_form(torch.float32, cpu) is PanelWeight
    assert fastest_form(torch.float16, cpu) is not PanelWeight
    assert fastest_form(torch.float32, torch.device("cuda")) is RowMajorWeight


def test_a_layer_packs_itself_when_its_last_part_arrives_and_gives_up_the_plain_weight():
    layer = ColumnParallelLinear(
        8, [("a", 4), ("b", 6)], method=UnquantizedConfig().linear_method(""), dtype=torch.float32
    )
    assert not hasattr(layer, "stored")
    parts = {"a.weight": random(4, 8), "b.weight": random(6, 8, seed=1)}
    fill(layer.parameters(), parts)
    assert layer.weight.numel() == 0
    assert torch.equal(layer.stored.unpack(), torch.cat(list(parts.values())))


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
    assert torch.equal(column.stored.unpack(), mine)
    assert torch.equal(
        column.bias.data, torch.cat((bias_a[2 * rank : 2 * rank + 2], bias_b[3 * rank : 3 * rank + 3]))
    )
    assert torch.equal(row.stored.unpack(), wide[:, 4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("out", [1, 7, 51])
@pytest.mark.parametrize("bias", [False, True])
def test_no_rows_and_odd_widths_are_no_exception(form, dtype, out, bias):
    """An idle replica brings no rows, and a share that is rounded up has any width."""
    skip_what_is_not_there(form, dtype)
    weight, offset = random(out, 33, dtype=dtype), random(out, dtype=dtype) if bias else None
    stored = form(weight)
    empty = stored.apply(random(0, 33, dtype=dtype), offset)
    assert (empty.shape, empty.dtype) == ((0, out), dtype)
    for rows in (1, 3):
        x = random(rows, 33, dtype=dtype, seed=1)
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        got = stored.apply(x, offset)
        assert (got.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max().clamp(min=1)

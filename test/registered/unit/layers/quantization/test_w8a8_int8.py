"""Layers that compute in int8: weights are quantized as they are read, and kernels and torch agree."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import math

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.kernels.linear_int8 import linear_int8, quantized_rows
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization import w8a8_int8
from sglang.srt.layers.quantization.w8a8_int8 import (
    Int8PanelWeight,
    Int8Weight,
    W8A8Int8Config,
    quantized_channels,
)
from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger, bytes_to_read
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model
from sglang.test.worker_driver import driven_worker

needs_kernels = pytest.mark.skipif(
    compiled_kernels() is None, reason="sgl_kernel is not installed, or switched off"
)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def item_of(name, whole, reads=None):
    def load(dtype, dim=0, start=0, length=None):
        count = whole.shape[dim] - start if length is None else length
        if reads is not None:
            reads.append((dim, start, count))
        return whole.narrow(dim, start, count).to(dtype)

    return WeightItem(name, "memory", tuple(whole.shape), load, whole.nbytes)


def fill(layer, tensors):
    WeightLedger(layer.parameters()).fill_all([item_of(*pair) for pair in tensors.items()])


def method():
    return W8A8Int8Config().linear_method("")


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
        yield


def without_kernels(monkeypatch):
    monkeypatch.setattr(w8a8_int8, "compiled_kernels", lambda: None)


def stored_of(driver):
    modules = driver.target.model_runner.model.modules()
    return {type(module.stored) for module in modules if hasattr(module, "stored")}


def logits_of(folder, rows=40, **fields):
    with driven_worker(folder, **fields) as driver:
        return driver.logits([(driver.add(list(range(5, 5 + rows))), rows)]), stored_of(driver)


def test_the_definition_is_arithmetic():
    """Scales 1 and 0.5: 127 * 2 - 3 * 4 and 127 * -1 + 0, plus the bias."""
    x = torch.tensor([[127.0, -3.0]])
    numbers = torch.tensor([[2, 4], [-1, 0]], dtype=torch.int8)
    out = linear_int8(x, numbers, torch.tensor([1.0, 0.5]), torch.tensor([1.0, 2.0]))
    assert out.tolist() == [[243.0, -61.5]]


def test_a_row_that_is_not_finite_gives_nan_and_its_neighbours_do_not_notice():
    x, (numbers, scales) = random(4, 1100), quantized_channels(random(6, 1100, seed=1))
    alone = linear_int8(x, numbers, scales, None)
    x[1, 3], x[2, 0] = math.inf, math.nan
    out = linear_int8(x, numbers, scales, None)
    assert out[1:3].isnan().all() and torch.equal(out[[0, 3]], alone[[0, 3]])
    assert not linear_int8(torch.zeros(2, 1100), numbers, scales, None).any()


def test_weights_are_rounded_by_at_most_half_a_step_and_never_reach_minus_128():
    weight = random(50, 67)
    weight[3], weight[4, 0] = 0, -9.0
    numbers, scales = quantized_channels(weight)
    assert numbers.amin() == -127 and not numbers[3].any() and scales[3] == 0
    error = (numbers * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_and_torch_give_the_same_bits(dtype, has_bias):
    """More inputs than a float32 sum holds exactly, and a row of zeros."""
    numbers, scales = quantized_channels(random(70, 2500))
    bias = random(70, seed=2).to(dtype) if has_bias else None
    x = random(9, 2500, seed=1).to(dtype)
    x[4] = 0
    fast, plain = Int8PanelWeight(numbers, scales), Int8Weight(numbers, scales)
    assert torch.equal(fast.apply(x, bias), plain.apply(x, bias))
    assert torch.equal(fast.unpack(), plain.unpack())


def test_a_tensor_is_read_in_parts_and_the_parts_leave_no_trace(monkeypatch):
    whole = random(37, 24)
    monkeypatch.setattr(w8a8_int8, "_CHUNK_VALUES", 24 * 10)
    reads = []
    layer = ColumnParallelLinear(24, [("a", 37)], method=method(), dtype=torch.bfloat16)
    WeightLedger(layer.parameters()).fill_all([item_of("a.weight", whole, reads)])
    assert reads == [(0, 0, 10), (0, 10, 10), (0, 20, 10), (0, 30, 7)]
    numbers, scales = quantized_channels(whole)  # of the file's numbers, not of those in the model's type
    assert torch.equal(layer.stored.unpack(), numbers * scales[:, None])
    assert layer.weight.numel() == 0 and layer.weight.numbers.numel() == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_has_the_numbers_of_one_rank_and_says_what_it_reads(rank):
    """Also a share of the inputs: its scales are those of whole outputs. What is padded is zeros."""
    a, b, wide = random(7, 8), random(6, 8, seed=1), random(5, 8, seed=2)
    wide[:, 0] = 50.0  # on rank 0 only, and in everybody's scale
    with published_topology(tp_size=3, ranks={"world_rank": rank, "dp_rank": None}):
        column = ColumnParallelLinear(8, [("a", 7), ("b", 6)], method=method(), dtype=torch.float32)
        row = RowParallelLinear("w", 8, 5, method=method(), dtype=torch.float32)
    sizes = bytes_to_read(
        [*column.parameters(), *row.parameters()], [item_of("a.weight", a), item_of("w.weight", wide)]
    )
    assert sizes == {"a.weight": [3, 3, 1][rank] * 32, "w.weight": wide.nbytes}
    fill(column, {"a.weight": a, "b.weight": b})
    fill(row, {"w.weight": wide})

    def rounded(weight):
        numbers, scales = quantized_channels(weight)
        return numbers * scales[:, None]

    mine = torch.zeros(5, 8)
    part = rounded(a)[3 * rank : 3 * rank + 3]
    mine[: len(part)], mine[3:] = part, rounded(b)[2 * rank : 2 * rank + 2]
    assert torch.equal(column.stored.unpack(), mine)
    mine = torch.zeros(5, 3)
    part = rounded(wide)[:, 3 * rank : 3 * rank + 3]
    mine[:, : part.shape[1]] = part
    assert torch.equal(row.stored.unpack(), mine)


def test_a_weight_that_is_not_finite_is_refused_with_its_place():
    whole = random(9, 8)
    whole[6, 2] = math.nan
    layer = ColumnParallelLinear(8, [("a", 9)], method=method(), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"tensor a.weight in memory: row 6 holds a number that is not"):
        fill(layer, {"a.weight": whole})


def test_more_inputs_than_a_sum_holds_are_refused():
    with pytest.raises(
        ValueError, match=r"a\.weight has 131073 inputs, and --quantization w8a8_int8 adds up"
    ):
        ColumnParallelLinear(131073, [("a", 1)], method=method(), dtype=torch.float32)


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_gives_nearly_the_logits_of_its_own_numbers(tmp_path, tie):
    """All linear layers and the head are int8, the tied one too."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128, tie=tie)
    plain, _ = logits_of(folder)
    found, kinds = logits_of(folder, quantization="w8a8_int8")
    assert len(kinds) == 1 and kinds <= {Int8PanelWeight, Int8Weight}
    assert 0 < (found - plain).norm() / plain.norm() < 0.06, "8 bits of weights and inputs"


@needs_kernels
def test_without_the_kernels_the_logits_are_the_same_and_a_warning_says_that_they_come_slower(
    tmp_path, monkeypatch, caplog
):
    folder = write_tiny_model(tmp_path / "model", hidden_size=64)
    fast, kinds = logits_of(folder, quantization="w8a8_int8")
    assert kinds == {Int8PanelWeight} and "slower" not in caplog.text
    without_kernels(monkeypatch)
    plain, kinds = logits_of(folder, quantization="w8a8_int8")
    assert kinds == {Int8Weight} and torch.equal(fast, plain)
    assert "torch computes" in caplog.text and "slower than without the flag" in caplog.text


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_of_every_source_are_quantized(tmp_path, load_format):
    folder = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    file = write_tiny_gguf(folder, quantization="Q8_0")
    for source in (file, folder):
        logits, kinds = logits_of(source, quantization="w8a8_int8", load_format=load_format, dtype="bfloat16")
        assert logits.isfinite().all() and kinds <= {Int8PanelWeight, Int8Weight}


@needs_kernels
def test_a_text_gives_the_same_bits_however_it_is_cut(tmp_path):
    """Chunks, steps and neighbours: rows are quantized one by one, and the kernels keep rows apart."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    ids = list(range(5, 45))
    with driven_worker(folder, quantization="w8a8_int8", attention_backend="cpu") as driver:
        whole = driver.logits([(driver.add(ids), 40)])[-1]
        seq, other = driver.add(ids), driver.add(list(range(60, 90)))
        driver.logits([(seq, 17)])
        driver.logits([(other, 9), (seq, 22)])
        parted = driver.logits([(seq, 1), (other, 1)])[0]
    assert torch.equal(parted, whole)


def draft_kinds(driver):
    return {
        type(module.stored)
        for module in driver.worker.drafter._draft.model.modules()
        if hasattr(module, "stored")
    }


@pytest.mark.parametrize(
    ("fields", "of_target", "of_draft"),
    [
        ({"quantization": "w8a8_int8"}, True, True),
        ({"speculative_draft_model_quantization": "w8a8_int8"}, False, True),
        ({}, False, False),
    ],
)
def test_a_whole_draft_follows_its_own_flag_and_without_one_the_targets(
    tmp_path, fields, of_target, of_draft
):
    folder = write_tiny_model(tmp_path / "model", hidden_size=64)
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    shape = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    with driven_worker(folder, **draft, **shape, **fields) as driver:
        int8 = {Int8PanelWeight, Int8Weight}
        assert bool(stored_of(driver) & int8) is of_target
        assert bool(draft_kinds(driver) & int8) is of_draft


@needs_kernels
@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_changes_no_answer(tmp_path, topk):
    """A row of a round gives the bits of a decode step, in int8 as in float32."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=64)
    other = write_tiny_model(tmp_path / "draft", hidden_size=64, seed=3)
    common = {"quantization": "w8a8_int8", "attention_backend": "cpu"}
    prompts = [list(range(5, 25)), [7, 9, 11], [40] * 6]
    with driven_worker(folder, **common) as driver:
        wanted = driver.generate([driver.add(ids) for ids in prompts], 24)
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(other)}
    shape = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 6,
    }
    with driven_worker(folder, **common, **draft, **shape) as driver:
        found, _ = driver.speculate([driver.add(ids) for ids in prompts], 24)
    assert [tokens[:24] for tokens in found] == wanted


def test_the_rows_of_a_product_do_not_know_each_other():
    x, (numbers, scales) = random(30, 100), quantized_channels(random(20, 100, seed=1))
    out = linear_int8(x, numbers, scales, None)
    assert all(
        torch.equal(linear_int8(x[i : i + 1], numbers, scales, None), out[i : i + 1]) for i in range(30)
    )
    assert torch.equal(quantized_rows(x)[0][3:4], quantized_rows(x[3:4])[0])

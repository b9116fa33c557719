"""Layers that compute with the blocks of a GGUF file: what is packed, and what is dequantized instead."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import logging

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.gguf import BlockStoredWeight, GGUFConfig
from sglang.srt.layers.weights.blocks import BlockPart
from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger
from sglang.srt.model_executor.model_runner_components import load_model
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model
from sglang.test.worker_driver import driven_worker

needs_kernels = pytest.mark.skipif(
    compiled_kernels() is None, reason="sgl_kernel is not installed, or switched off"
)


def random_part(rows, columns, *, bits=4, has_minima=False, seed=0):
    """Numbers of a type, with scales that a half float holds: for 16 of them where they have 6 bits."""
    draw = torch.Generator().manual_seed(seed)
    low, high = (0, 2**bits) if has_minima else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    numbers = torch.randint(low, high, (rows, columns), generator=draw).to(torch.int8)
    scales = torch.randn(rows, columns // (16 if bits == 6 else 32), generator=draw).half().float() * 0.125
    minima = torch.randn(rows, columns // 32, generator=draw).half().float() * 0.125
    return BlockPart(numbers, scales, minima if has_minima else None)


def item_of(name, part, *, is_dense=False):
    whole = part.dequantized()

    def load(dtype, dim=0, start=0, length=None):
        return whole.narrow(dim, start, whole.shape[dim] - start if length is None else length).to(dtype)

    def load_blocks(dim, start, length):
        def cut(values, unit):
            begin, count = (start, length) if dim == 0 else (start // unit, length // unit)
            return values.narrow(dim, begin, count)

        minima = None if part.minima is None else cut(part.minima, 32)
        return BlockPart(cut(part.numbers, 1), cut(part.scales, 32 // part.scales_of_block), minima)

    return WeightItem(
        name,
        "memory",
        tuple(whole.shape),
        load,
        whole.nbytes,
        block=1 if is_dense else 32,
        load_blocks=None if is_dense else load_blocks,
    )


def column_layer(parts, **options):
    method = GGUFConfig().linear_method("")
    return ColumnParallelLinear(
        64,
        [(name, len(part.numbers)) for name, part in parts.items()],
        method=method,
        dtype=torch.float32,
        **options,
    )


def fill(layer, items):
    WeightLedger(layer.parameters()).fill_all(items)


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
        yield


@needs_kernels
@pytest.mark.parametrize(
    ("kinds", "forms"),
    [
        ([(4, False), (4, False)], ["Q4"]),
        ([(4, True), (4, True), (5, True)], ["Q4_MIN", "Q5_MIN"]),
        ([(8, False), (4, False)], ["Q8", "Q4"]),
        ([(4, True), (4, True), (6, False)], ["Q4_MIN", "Q6"]),  # q, k and v of a Q4_K_M file
        ([(5, False), (6, False), (6, False), (5, False)], ["Q5", "Q6", "Q5"]),
    ],
)
def test_parts_keep_the_fewest_bits_and_neighbours_of_one_form_are_one(kinds, forms):
    parts = {
        name: random_part(20 + 20 * i, 64, bits=bits, has_minima=has_minima, seed=i)
        for i, (name, (bits, has_minima)) in enumerate(zip("abcd", kinds, strict=False))
    }
    layer = column_layer(parts)
    fill(layer, [item_of(f"{name}.weight", part) for name, part in parts.items()])
    assert isinstance(layer.stored, BlockStoredWeight) and layer.stored.forms == forms
    want = torch.cat([part.dequantized() for part in parts.values()])
    assert torch.equal(layer.stored.unpack(), want)
    assert layer.weight.numel() == 0
    x, bias = torch.randn(3, 64), torch.randn(len(want))
    exact = x.double() @ want.double().T
    for out, wanted in (
        (layer(x), exact),
        (layer.stored.apply(x, bias), exact + bias),
        (layer.stored.scores(x.bfloat16()), x.bfloat16().double() @ want.double().T),
    ):
        assert out.dtype == torch.float32
        assert (out - wanted).abs().max() < 0.02 * exact.abs().max(), "x is rounded to 8 bits"


@needs_kernels
def test_a_part_that_is_no_block_makes_the_layer_a_dense_one(caplog):
    caplog.set_level(logging.INFO)
    parts = {"a": random_part(20, 64), "b": random_part(12, 64, seed=1)}
    layer = column_layer(parts)
    fill(layer, [item_of("a.weight", parts["a"]), item_of("b.weight", parts["b"], is_dense=True)])
    assert not isinstance(layer.stored, BlockStoredWeight)
    assert torch.equal(layer.stored.unpack(), torch.cat([part.dequantized() for part in parts.values()]))
    assert "a.weight, b.weight: not computed as blocks" in caplog.text
    caplog.clear()
    fill(column_layer({"a": parts["a"]}), [item_of("a.weight", parts["a"], is_dense=True)])
    assert not caplog.text, "a file without blocks has nothing to tell"


@needs_kernels
@pytest.mark.parametrize("bits", [5, 6, 8])
def test_rows_of_a_table_come_out_of_its_blocks(bits):
    part = random_part(40, 64, bits=bits)
    layer = column_layer({"a": part})
    fill(layer, [item_of("a.weight", part)])
    ids = torch.tensor([39, 0, 17])
    assert torch.equal(layer.stored.rows(ids, torch.empty(3, 64), 0, False), part.dequantized()[ids])


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_take_their_rows_and_the_last_one_pads_with_zeros(rank):
    """Also a part of which the last rank has no row at all."""
    parts = {"a": random_part(40, 64), "b": random_part(40, 64, bits=6), "c": random_part(2, 64, bits=5)}
    with published_topology(tp_size=3, ranks={"world_rank": rank, "dp_rank": None}):
        layer = column_layer(parts)
    fill(layer, [item_of(f"{name}.weight", part) for name, part in parts.items()])
    mine = torch.zeros(29, 64)
    for first, room, name in ((0, 14, "a"), (14, 14, "b"), (28, 1, "c")):
        rows = parts[name].dequantized()[room * rank : room * rank + room]
        mine[first : first + len(rows)] = rows
    assert isinstance(layer.stored, BlockStoredWeight)
    assert torch.equal(layer.stored.unpack(), mine)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize(("inputs", "is_packed"), [(128, True), (96, False)])
def test_input_features_are_cut_between_blocks_or_not_packed(inputs, is_packed, bits):
    part = random_part(8, inputs, bits=bits)
    for rank in (0, 1):
        with published_topology(tp_size=2, ranks={"world_rank": rank, "dp_rank": None}):
            method = GGUFConfig().linear_method("")
            layer = RowParallelLinear("w", inputs, 8, method=method, dtype=torch.float32)
        fill(layer, [item_of("w.weight", part)])
        assert isinstance(layer.stored, BlockStoredWeight) is is_packed
        half = inputs // 2
        assert torch.equal(layer.stored.unpack(), part.dequantized()[:, half * rank : half * rank + half])


@needs_kernels
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"])
def test_a_model_gives_nearly_the_logits_of_its_dequantized_weights(tmp_path, quantization):
    size = 4 if quantization == "Q6_K" else 1  # its blocks have 256 numbers
    folder = write_tiny_model(
        tmp_path / "model",
        hidden_size=64 * size,
        intermediate_size=128 * size,
        head_dim=16 * size,
        tie=True,
    )
    file = write_tiny_gguf(folder, quantization=quantization)
    logits = {}
    for fields in ({}, {"quantization": "gguf"}):
        with driven_worker(file, **fields) as driver:
            seq = driver.add(list(range(5, 45)))
            logits[len(fields)] = driver.logits([(seq, 40)])
            kinds = {
                type(module.stored)
                for module in driver.target.model_runner.model.modules()
                if hasattr(module, "stored")
            }
            assert (kinds == {BlockStoredWeight}) == bool(fields)
            table = driver.target.model_runner.model.model.embed_tokens.weight
            assert table.numel() == 0, "a tied head holds the numbers of the table"
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.06, "8-bit inputs of every layer"


def test_without_the_kernels_blocks_are_dequantized_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(load_model, "compiled_kernels", lambda: None)
    file = write_tiny_gguf(write_tiny_model(tmp_path / "model"), quantization="Q4_1")
    with driven_worker(file, quantization="gguf") as driver:
        modules = driver.target.model_runner.model.modules()
        assert not any(isinstance(getattr(module, "stored", None), BlockStoredWeight) for module in modules)
    assert "are dequantized, because only the compiled kernels" in caplog.text

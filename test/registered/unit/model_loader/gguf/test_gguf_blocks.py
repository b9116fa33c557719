"""Blocks of a GGUF file as whole numbers with scales are the values that the file decodes to."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import gguf
import numpy as np
import pytest
import torch

from sglang.srt.configs.gguf.types import GGML_TYPES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.gguf.dequant import SPLITTERS, dequantize, split_rows
from sglang.srt.model_loader.gguf.reader import gguf_weights
from sglang.test.gguf_q6_k import q6_k_blocks
from sglang.test.tiny_models import write_tiny_gguf

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


def items_of(tiny, quantization, **fields):
    file = write_tiny_gguf(tiny(num_layers=1, **fields), quantization=quantization)
    return {item.name: item for item in gguf_weights(ModelConfig.from_path(file))}


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_every_part_of_every_matrix_is_what_is_decoded(tiny, quantization, architecture):
    seen = 0
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if quantization == "Q6_K" else {}
    for item in items_of(tiny, quantization, architecture=architecture, **wide).values():
        if len(item.shape) == 1:
            assert item.load_blocks is None
            continue
        seen += 1
        rows, columns = item.shape
        whole = item.load(torch.float32)
        for start, length in ((0, rows), (1, rows - 2), (rows // 2, rows // 2)):
            part = item.load_blocks(0, start, length)
            assert part.numbers.dtype == torch.int8
            assert torch.equal(part.dequantized(), whole[start : start + length]), item.name
        for start, length in ((0, columns), (columns - 32, 32)):
            part = item.load_blocks(1, start, length)
            assert torch.equal(part.dequantized(), whole[:, start : start + length]), item.name
    assert seen == 9


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
def test_numbers_without_scales_are_no_blocks(tiny, quantization):
    assert all(item.load_blocks is None for item in items_of(tiny, quantization).values())


@pytest.mark.parametrize("name", SPLITTERS)
def test_columns_may_begin_anywhere_between_scales(name):
    """A block of the K formats has 8 or 16 scales; a rank's share need not hold whole blocks."""
    kind, rows, columns = TYPES[name], 5, 1024
    raw = np.random.default_rng(3).integers(0, 256, kind.nbytes(rows * columns), dtype=np.uint8)
    blocks = raw.reshape(-1, kind.block_bytes)
    finite = slice(208, 210) if name == "Q6_K" else slice(0, 4)
    blocks[:, finite].view(np.float16)[:] = 0.125
    whole = dequantize(memoryview(raw), kind, (rows, columns), torch.float32, "w")
    for start, length in ((0, 1024), (32, 64), (512, 512), (992, 32)):
        found = split_rows(memoryview(raw), kind, rows, columns, (start, length))
        values = found.numbers * found.scales[:, :, None]
        if found.minima is not None:
            values = values + found.minima[:, :, None]
        size = 16 if name == "Q6_K" else 32
        assert found.numbers.shape == (rows, length // size, size)
        got = torch.from_numpy(values.reshape(rows, -1).astype(np.float32))
        torch.testing.assert_close(got, whole[:, start : start + length], rtol=0, atol=0)


def test_a_scale_is_for_32_numbers_or_for_16():
    """No other width is packed."""
    for name in SPLITTERS:
        raw = np.zeros((2, TYPES[name].block_bytes), dtype=np.uint8)
        found = SPLITTERS[name](raw)
        assert found.numbers.shape[2] in (16, 32), name
        assert found.minima is None or found.numbers.shape[2] == 32, name


def test_what_is_written_as_q6_k_is_nearly_what_it_was():
    """The tiny models of the other tests would be anything if their writer were wrong."""
    rows = np.random.default_rng(5).standard_normal((3, 512), dtype=np.float32)
    rows[1, :256] = 0
    found = gguf.quants.dequantize(q6_k_blocks(rows), gguf.GGMLQuantizationType.Q6_K)
    assert np.abs(found - rows).max() < 0.05 * np.abs(rows).max()

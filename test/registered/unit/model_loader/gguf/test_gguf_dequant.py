from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import gguf
import numpy as np
import pytest
import torch

from sglang.srt.configs.gguf.types import GGML_TYPES
from sglang.srt.model_loader.gguf.dequant import _CHUNK_VALUES, DECODERS, dequantize

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
SERVED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def theirs(raw: np.ndarray, name: str, rows: int) -> torch.Tensor:
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(values.astype(np.float32))


def test_the_types_that_are_promised_are_read():
    assert list(DECODERS) == SERVED


@pytest.mark.parametrize("name", SERVED)
def test_random_blocks_decode_to_exactly_the_reference(name):
    """Random bits reach every scale, minimum and quant, also NaN and infinite scales, which a real file may
    not.
    """
    rows, columns = 8, 4096
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, TYPES[name].nbytes(rows * columns), dtype=np.uint8)
    with np.errstate(all="ignore"):
        got = dequantize(memoryview(raw), TYPES[name], (rows, columns), torch.float32, "w")
    torch.testing.assert_close(got, theirs(raw, name, rows), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_numbers_come_back_near_themselves(name):
    """The reference could be wrong together with us on noise; here the answer is known from outside."""
    values = np.random.default_rng(1).standard_normal((4, 256), dtype=np.float32)
    raw = np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])).view(np.uint8)
    got = dequantize(memoryview(raw.reshape(-1)), TYPES[name], (4, 256), torch.float32, "w")
    step = {"F32": 0, "F16": 2e-3, "BF16": 2e-2}.get(name, 0.6 if "4" in name else 0.3)
    assert (got - torch.from_numpy(values)).abs().max() <= step


def test_a_tensor_larger_than_the_scratch_is_decoded_whole():
    values = np.random.default_rng(2).standard_normal((5, _CHUNK_VALUES // 4), dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    got = dequantize(memoryview(raw.reshape(-1)), TYPES["Q4_1"], values.shape, torch.float32, "w")
    assert torch.equal(got, theirs(raw, "Q4_1", 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_rounded_once_from_float32(dtype):
    values = np.random.default_rng(3).standard_normal((2, 256), dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    got = dequantize(memoryview(raw.reshape(-1)), TYPES["Q8_0"], values.shape, dtype, "w")
    assert got.dtype == dtype
    assert torch.equal(got, theirs(raw, "Q8_0", 2).to(dtype))


def test_read_only_memory_is_decoded_without_being_touched():
    """Weights come from a read-only map; writing to it would kill the process."""
    raw = bytes(range(256))
    got = dequantize(memoryview(raw), TYPES["F32"], (8, 8), torch.float32, "w")
    got.zero_()
    assert raw == bytes(range(256))


def test_a_type_that_is_not_read_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"w is stored as IQ4_XS, which is not read; known: F32, F16.*Q6_K"):
        dequantize(memoryview(bytes(136)), TYPES["IQ4_XS"], (1, 256), torch.float32, "w")


def test_data_of_the_wrong_length_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"\[2, 32\] needs 68 bytes, it has 67"):
        dequantize(memoryview(bytes(67)), TYPES["Q8_0"], (2, 32), torch.float32, "w")

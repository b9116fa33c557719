from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pathlib
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from sglang.srt.configs.gguf.header import GGUFHeader
from sglang.srt.configs.gguf.types import GGML_TYPES

WORDS = ["alpha", "", "gamma ünïcode 🙂", "delta"]
MATRIX = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)


def write_sample(path: pathlib.Path) -> pathlib.Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -5)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 1 << 63)
    writer.add_int64("t.i64", -(1 << 62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 1e-300)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "naïve\ntext")
    writer.add_array("t.words", WORDS)
    writer.add_array("t.numbers", [3, -1, 2])
    writer.add_array("t.floats", [0.25, -1.5])
    writer.add_array("t.flags", [True, False, True])
    writer.add_tensor("first", MATRIX)
    writer.add_tensor("second", MATRIX[0].astype(np.float16))
    packed = gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("third", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sample(tmp_path):
    return write_sample(tmp_path / "sample.gguf")


def raw_file(
    path: pathlib.Path, *, metadata: bytes = b"", entries: int = 0, tensors: bytes = b"", count: int = 0
):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, entries) + metadata + tensors)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_every_value_that_the_gguf_package_writes_comes_back(sample):
    meta = GGUFHeader(sample).metadata
    assert meta["general.architecture"] == "llama"
    assert [meta[f"t.{k}"] for k in ("u8", "i8", "u16", "i16")] == [200, -5, 60000, -30000]
    assert [meta["t.u32"], meta["t.i32"]] == [4_000_000_000, -2_000_000_000]
    assert [meta["t.u64"], meta["t.i64"]] == [1 << 63, -(1 << 62)]
    assert [meta["t.f32"], meta["t.f64"]] == [0.5, 1e-300]
    assert meta["t.yes"] is True and meta["t.no"] is False
    assert meta["t.text"] == "naïve\ntext"
    assert meta["t.words"] == WORDS
    assert meta["t.numbers"] == [3, -1, 2]
    assert meta["t.floats"] == [0.25, -1.5]
    assert meta["t.flags"] == [True, False, True]


def test_the_tensor_table_says_where_the_data_is(sample):
    header = GGUFHeader(sample)
    first, second, third = (header.tensors[name] for name in ("first", "second", "third"))
    assert (first.shape, first.type.name) == ((6, 32), "F32")
    assert (second.shape, second.type.name) == ((32,), "F16")
    assert (third.shape, third.type.name, third.nbytes) == ((6, 32), "Q8_0", 6 * 34)
    assert bytes(header.data(first)) == MATRIX.tobytes()
    assert bytes(header.data(second)) == MATRIX[0].astype(np.float16).tobytes()


def test_an_array_is_decoded_at_its_first_read_and_not_before(sample, monkeypatch):
    """A vocabulary takes longer to decode than everything else in the head together."""
    header = GGUFHeader(sample)
    calls = []
    decode = header.metadata._reader.array
    monkeypatch.setattr(header.metadata._reader, "array", lambda *a: calls.append(a) or decode(*a))
    assert "t.words" in header.metadata and len(header.metadata) > 10 and list(header.metadata)
    assert calls == []
    first = header.metadata["t.words"]
    assert header.metadata["t.words"] is first
    assert len(calls) == 1


def test_the_type_table_is_the_one_of_the_gguf_package():
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {number: (t.name, t.block_elements, t.block_bytes) for number, t in GGML_TYPES.items()}
    assert {number: ours.get(number) for number in theirs} == theirs


def test_a_file_cut_anywhere_is_refused_with_its_name_and_both_sizes(sample, tmp_path):
    """Every length but the full one: a cut that opens would be read as garbage weights later."""
    whole = sample.read_bytes()
    data_end = max(t.offset + t.nbytes for t in GGUFHeader(sample).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(data_end):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError) as caught:
            GGUFHeader(cut)
        message = str(caught.value)
        assert str(cut) in message and str(length) in message, (length, message)


def test_a_cut_inside_the_data_names_the_tensor(sample, tmp_path):
    header = GGUFHeader(sample)
    second = header.tensors["second"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sample.read_bytes()[: second.offset + 10])
    with pytest.raises(ValueError, match=r"truncated.*'second'.*\[32\].*ends at byte \d+.*has \d+ bytes"):
        GGUFHeader(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not one of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "announces 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "announces 1152921504606846976 metadata"),
    ],
)
def test_a_head_that_cannot_be_true_is_refused(tmp_path, content, message):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFHeader(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (text("k") + struct.pack("<I", 99) + bytes(8), "unknown value type 99"),
        (text("k") + struct.pack("<IIQ", 9, 77, 1) + bytes(8), "array of the unknown value type 77"),
        (text("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "truncated or corrupt: metadata 'k'"),
        (text("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 62), "truncated or corrupt: metadata 'k'"),
        (text("k") + struct.pack("<IIQQQ", 9, 8, 2, 1 << 63, 1), "truncated or corrupt: metadata 'k'"),
        (struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1), "not valid UTF-8"),
        (text("general.alignment") + struct.pack("<II", 4, 33), "alignment is 33.*power of two"),
    ],
)
def test_corrupt_metadata_is_refused_with_its_key(tmp_path, metadata, message):
    file = raw_file(tmp_path / "bad.gguf", metadata=metadata, entries=1)
    with pytest.raises(ValueError, match=message):
        GGUFHeader(file)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    entry = text("k") + struct.pack("<II", 4, 1)
    with pytest.raises(ValueError, match="'k' is there twice"):
        GGUFHeader(raw_file(tmp_path / "bad.gguf", metadata=entry * 2, entries=2))


def test_arrays_of_arrays_are_read(tmp_path):
    inner = struct.pack("<IQ", 5, 2) + struct.pack("<ii", 1, -2) + struct.pack("<IQ", 8, 1) + text("x")
    metadata = text("k") + struct.pack("<IIQ", 9, 9, 2) + inner
    header = GGUFHeader(raw_file(tmp_path / "nested.gguf", metadata=metadata, entries=1))
    assert header.metadata["k"] == [[1, -2], ["x"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (text("w") + struct.pack("<IQIQ", 1, 32, 77, 0), "unknown type 77"),
        (text("w") + struct.pack("<IQIQ", 1, 33, 8, 0), r"\[33\].*not a multiple of 32, the block of Q8_0"),
        (text("w") + struct.pack("<IQIQ", 1, 4, 0, 5), "starts at 5.*alignment 32"),
        (text("w") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), "truncated.*'w'"),
        (text("w") + struct.pack("<I", 9) + bytes(100), "9 dimensions"),
    ],
)
def test_a_tensor_row_that_cannot_be_true_is_refused_with_its_name(tmp_path, row, message):
    file = raw_file(tmp_path / "bad.gguf", tensors=row + bytes(64), count=1)
    with pytest.raises(ValueError, match=message):
        GGUFHeader(file)


def test_a_tensor_listed_twice_is_refused(tmp_path):
    row = text("w") + struct.pack("<IQIQ", 1, 2, 0, 0)
    with pytest.raises(ValueError, match="'w' is listed twice"):
        GGUFHeader(raw_file(tmp_path / "bad.gguf", tensors=row * 2 + bytes(64), count=2))


def test_require_names_the_key_and_what_is_there(sample):
    header = GGUFHeader(sample)
    with pytest.raises(ValueError, match=r"sample.gguf.*no key 'llama.block_count'"):
        header.require("llama.block_count", int)
    with pytest.raises(ValueError, match=r"'t.text' is 'naïve"):
        header.require("t.text", int)


def test_a_missing_file_is_the_users_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        GGUFHeader(tmp_path / "nope.gguf")


def test_reading_a_head_loads_neither_torch_nor_numpy(sample):
    """The server process opens the head; torch alone would double its start time."""
    code = (
        "import sys, pathlib\n"
        "from sglang.srt.configs.gguf.header import GGUFHeader\n"
        "from sglang.srt.configs.model_config import ModelConfig\n"
        f"assert GGUFHeader(pathlib.Path({str(sample)!r})).metadata['t.words']\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

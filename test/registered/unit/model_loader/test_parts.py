"""A rank reads its part of a checkpoint and no more, and that part is the one cut out of the whole."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import dataclasses

import numpy as np
import pytest
import torch

from sglang.srt.configs.gguf.types import GGML_TYPES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import loader, safetensors_weights
from sglang.srt.model_loader.dummy import _CHUNK_ROWS, _values, dummy_weights
from sglang.srt.model_loader.gguf import dequant as gguf_dequant
from sglang.srt.model_loader.gguf.dequant import DECODERS, dequantize
from sglang.srt.model_loader.loader import load_model, open_checkpoint
from sglang.srt.models.registry import model_class
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_gguf

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


def assert_parts_are_cut_out_of_the_whole(items):
    """Each dimension of each tensor, at cuts that fall on no block and in the middle of a head."""
    assert items
    for item in items:
        whole = item.load(torch.float32)
        assert whole.shape == item.shape
        for dim, size in enumerate(item.shape):
            for start, length in ((0, size), (0, 1), (3, size // 2), (size // 3, size - size // 3)):
                part = item.load(torch.float32, dim, start, length)
                assert torch.equal(part, whole.narrow(dim, start, length)), (item.name, dim, start, length)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_of_a_safetensors_file(tiny, dtype):
    config = ModelConfig.from_path(tiny(dtype=dtype, num_layers=1))
    assert_parts_are_cut_out_of_the_whole(open_checkpoint(config, "auto", torch.float32).items)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_parts_of_a_gguf_file(tiny, architecture, quantization):
    """Also of the query and key projections of a Llama, whose rows the file shuffles."""
    folder = tiny(architecture=architecture, num_layers=1)
    config = ModelConfig.from_path(write_tiny_gguf(folder, quantization=quantization))
    assert_parts_are_cut_out_of_the_whole(open_checkpoint(config, "auto", torch.float32).items)


@pytest.mark.parametrize("tie", [False, True])
def test_parts_of_dummy_weights(tiny, tie):
    config = ModelConfig.from_path(tiny(num_layers=1, tie=tie))
    assert_parts_are_cut_out_of_the_whole(dummy_weights(config, torch.float32))


@pytest.mark.parametrize("rows", [_CHUNK_ROWS, _CHUNK_ROWS + 1, 3 * _CHUNK_ROWS + 5])
def test_parts_of_a_dummy_tensor_of_several_chunks(rows):
    whole = _values("w", (rows, 3), torch.float32)
    assert not torch.equal(whole[:1], whole[-1:])
    for start, length in ((0, rows), (5, rows - 7), (_CHUNK_ROWS - 1, rows - _CHUNK_ROWS + 1)):
        assert torch.equal(_values("w", (rows, 3), torch.float32, 0, start, length), whole[start:][:length])
    assert torch.equal(_values("w", (rows, 3), torch.float32, 1, 1, 2), whole[:, 1:])


@pytest.mark.parametrize("name", list(DECODERS))
def test_columns_decode_to_the_same_bits_out_of_the_blocks_that_hold_them(name, monkeypatch):
    kind, rows, columns = TYPES[name], 6, 1024
    raw = np.random.default_rng(3).integers(0, 256, kind.nbytes(rows * columns), dtype=np.uint8)
    decoded = []
    decode = DECODERS[name]
    monkeypatch.setitem(DECODERS, name, lambda blocks: decoded.append(len(blocks)) or decode(blocks))
    with np.errstate(all="ignore"):
        whole = dequantize(memoryview(raw), kind, (rows, columns), torch.float32, "w")
        assert sum(decoded) == rows * columns // kind.block_elements
        for start, length in ((0, 1024), (0, 512), (512, 512), (300, 77), (1023, 1)):
            decoded.clear()
            part = dequantize(memoryview(raw), kind, (rows, columns), torch.float32, "w", (start, length))
            assert part.is_contiguous()
            torch.testing.assert_close(part, whole[:, start : start + length], rtol=0, atol=0, equal_nan=True)
            size = kind.block_elements
            assert sum(decoded) == rows * (-(-(start + length) // size) - start // size), (start, length)


def test_columns_of_more_rows_than_fit_into_the_scratch():
    rows = gguf_dequant._CHUNK_VALUES // 64 + 3
    raw = np.random.default_rng(4).integers(0, 256, TYPES["Q4_0"].nbytes(rows * 128), dtype=np.uint8)
    with np.errstate(all="ignore"):
        whole = dequantize(memoryview(raw), TYPES["Q4_0"], (rows, 128), torch.float32, "w")
        part = dequantize(memoryview(raw), TYPES["Q4_0"], (rows, 128), torch.float32, "w", (40, 50))
    torch.testing.assert_close(part, whole[:, 40:90], rtol=0, atol=0, equal_nan=True)


# What a rank reads ----------------------------------------------------------------------------------------


class Meter:
    """Bytes of a file that the readers were really asked for, by the lowest functions that touch it."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        self.largest = 0
        opened = safetensors_weights._open
        monkeypatch.setattr(safetensors_weights, "_open", lambda file: _Handle(self, opened(file)))
        for name, decode in DECODERS.items():
            monkeypatch.setitem(
                DECODERS, name, lambda blocks, d=decode: self.count(blocks.nbytes) or d(blocks)
            )

    def count(self, nbytes):
        self.nbytes += nbytes
        self.largest = max(self.largest, nbytes)


class _Handle:
    def __init__(self, meter, handle):
        self.meter, self.handle = meter, handle

    def get_tensor(self, name):
        tensor = self.handle.get_tensor(name)
        self.meter.count(tensor.nbytes)
        return tensor

    def get_slice(self, name):
        return _Slice(self.meter, self.handle.get_slice(name))


class _Slice:
    def __init__(self, meter, part):
        self.meter, self.part = meter, part

    def __getitem__(self, key):
        tensor = self.part[key]
        self.meter.count(tensor.nbytes)
        return tensor


def read_everything(model, items):
    """The planted mistake: every part is cut out of a whole tensor that was read first."""

    def greedy(item):
        def load(dtype, dim=0, start=0, length=None):
            whole = item.load(dtype)
            return whole if length is None else whole.narrow(dim, start, length)

        return dataclasses.replace(item, load=load)

    model.load_weights([greedy(item) for item in items])


def bytes_read(monkeypatch, config, rank, width, load=None):
    """(bytes that one rank reads, bytes that the progress bar announces, bytes of the file)."""
    with (
        monkeypatch.context() as patch,
        published_topology(tp_size=width, ranks={"world_rank": rank, "dp_rank": None}),
    ):
        meter = Meter(patch)
        announced = []
        patch.setattr(
            loader, "_with_progress", lambda items, nbytes: announced.append(sum(nbytes.values())) or items
        )
        model = model_class(config.architecture)(config, dtype=torch.float32)
        checkpoint = open_checkpoint(config, "auto", torch.float32)
        if load is None:
            load_model(model, checkpoint, dtype=torch.float32, show_progress=True)
        else:
            load(model, checkpoint.items)
    total = sum(item.nbytes for item in checkpoint.items)
    return meter.nbytes, announced[0] if announced else None, total


# The parts that every rank holds: norms. Cut: everything else, 128 values of any width.
SHAPE = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128, "vocab_size": 512}


@pytest.mark.parametrize("quantization", [None, "F16", "Q8_0"])
@pytest.mark.parametrize("tie", [False, True])
def test_each_of_two_ranks_reads_half_and_says_so(tiny, monkeypatch, quantization, tie):
    folder = tiny(**SHAPE, tie=tie)
    config = ModelConfig.from_path(
        write_tiny_gguf(folder, quantization=quantization) if quantization else folder
    )
    alone, announced, total = bytes_read(monkeypatch, config, 0, 1)
    assert alone == announced == total
    norms = sum(
        i.nbytes
        for i in open_checkpoint(config, "auto", torch.float32).items
        if i.name.endswith("norm.weight")
    )
    for rank in range(2):
        read, announced, _ = bytes_read(monkeypatch, config, rank, 2)
        assert read == announced == (total - norms) // 2 + norms


def test_a_reader_that_reads_everything_is_seen(tiny, monkeypatch):
    config = ModelConfig.from_path(tiny(**SHAPE))
    read, _, total = bytes_read(monkeypatch, config, 1, 2, load=read_everything)
    assert read == total


def test_padding_is_not_read(tiny, monkeypatch):
    """9 query and 3 key/value heads, 509 ids, 45 features: the two ranks together read the file once."""
    folder = tiny(num_heads=9, num_kv_heads=3, vocab_size=509, intermediate_size=45)
    config = ModelConfig.from_path(folder)
    total = bytes_read(monkeypatch, config, 0, 1)[2]
    norms = sum(
        i.nbytes
        for i in open_checkpoint(config, "auto", torch.float32).items
        if i.name.endswith("norm.weight")
    )
    reads = [bytes_read(monkeypatch, config, rank, 2)[:2] for rank in range(2)]
    assert all(read == announced for read, announced in reads)
    assert sum(read for read, _ in reads) == total + norms


def test_blocks_that_a_cut_parts_are_read_by_both_ranks_and_counted(tiny, monkeypatch):
    """48 input features of Q8_0 blocks of 32: 2 ranks need 24 each, and the first block holds both cuts."""
    folder = tiny(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96)
    config = ModelConfig.from_path(write_tiny_gguf(folder, quantization="Q8_0"))
    items = {item.name: item for item in open_checkpoint(config, "auto", torch.float32).items}
    down = items["model.layers.0.mlp.down_proj.weight"]
    assert down.block == 32
    assert down.part_nbytes(1, 0, 48) == down.part_nbytes(1, 48, 48) == 64 * 2 * 34
    assert down.part_nbytes(0, 0, 32) == down.nbytes // 2
    assert down.part_nbytes(1, 96, 0) == 0
    reads = [bytes_read(monkeypatch, config, rank, 2) for rank in range(2)]
    assert all(read == announced for read, announced, _ in reads)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_shards_of_all_ranks_are_the_rows_of_the_one_rank_model(tiny, load_format):
    """Whatever the width, ranks hold parts of one model, so that layouts can be compared."""
    config = ModelConfig.from_path(tiny(num_heads=9, num_kv_heads=3, vocab_size=509, intermediate_size=45))

    def shards(width):
        tables, downs = [], []
        for rank in range(width):
            with published_topology(tp_size=width, ranks={"world_rank": rank, "dp_rank": None}):
                model = model_class(config.architecture)(config, dtype=torch.float32)
                load_model(model, open_checkpoint(config, load_format, torch.float32), dtype=torch.float32)
            down = model.model.layers[1].mlp.down_proj
            tables.append(model.lm_head.stored.unpack())
            downs.append(down.stored.unpack())
        return torch.cat(tables), torch.cat(downs, dim=1)

    table, down = shards(1)
    for width in (2, 4):
        tables, downs = shards(width)
        assert torch.equal(tables[:509], table) and (tables[509:] == 0).all()
        assert torch.equal(downs[:, :45], down) and (downs[:, 45:] == 0).all()

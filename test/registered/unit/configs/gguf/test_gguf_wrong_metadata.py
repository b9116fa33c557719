"""A GGUF file whose metadata says something of the wrong kind is refused by name, whoever reads it first."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import struct

import pytest

from sglang.srt.configs.gguf.header import GGUFHeader, _Reader
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


VALUES = {
    "text": struct.pack("<I", 8) + text("abc"),
    "nothing": struct.pack("<II", 4, 0),
    "number": struct.pack("<II", 4, 7),
    "negative": struct.pack("<Ii", 5, -5),
    "largest": struct.pack("<IQ", 10, 2**63),
    "fraction": struct.pack("<If", 6, 1.5),
    "nan": struct.pack("<If", 6, float("nan")),
    "true": struct.pack("<IB", 7, 1),
    "empty array": struct.pack("<IIQ", 9, 4, 0),
    "texts": struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
    "numbers": struct.pack("<IIQII", 9, 4, 2, 1, 2),
    "arrays": struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 5),
}
FURTHER = [
    "llama.rope.scaling.type",
    "llama.expert_count",
    "general.alignment",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.chat_template.tool_use",
]


@pytest.fixture(scope="module")
def swap(tmp_path_factory):
    """Write the file with the value of one key replaced, or the key added."""
    folder = tmp_path_factory.mktemp("gguf")
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}
    good = folder / "good.gguf"
    write_tiny_gguf(write_tiny_model(folder / "m", vocab_size=300, **shape), good)
    header, raw = GGUFHeader(good), good.read_bytes()
    reader, position, records = _Reader(good, header._map), 24, {}
    for _ in range(len(header.metadata)):
        start = position
        key, position = reader.string(position, "key")
        kind, position = reader.u32(position, "type")
        _, position = reader._value(kind, position, "value")
        records[key] = raw[start:position]
    _, table_end = reader.tensor_table(position, len(header.tensors))

    def write(key, value):
        changed = {**records, key: text(key) + value}
        head = raw[:16] + struct.pack("<Q", len(changed)) + b"".join(changed.values())
        head += raw[position:table_end]
        path = folder / "changed.gguf"
        path.unlink(missing_ok=True)
        path.write_bytes(head + b"\0" * (-len(head) % 32) + raw[header.data_start :])
        return path

    write.keys = [*records, *FURTHER]
    return write


def complaints(path):
    """What config and tokenizer say against a file; anything but a ValueError comes out."""
    said = []
    for read in (ModelConfig.from_path, load_tokenizer):
        try:
            read(path)
        except ValueError as error:
            said.append(str(error))
    return said


def test_every_key_with_every_kind_of_value_is_read_or_refused_with_the_name_of_the_file(swap):
    for key in swap.keys:
        for value in VALUES.values():
            for sentence in complaints(swap(key, value)):
                assert "changed.gguf" in sentence, (key, sentence)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "llama.attention.head_count",
            "nothing",
            "shape (32, 32), by the metadata it must be (0, 32)",
        ),
        ("llama.block_count", "number", "announces 7 layers, the file holds tensors of 1"),
        ("llama.feed_forward_length", "number", "ffn_up.weight has shape (64, 32)"),
        ("llama.embedding_length", "number", "token_embd.weight has shape (300, 32)"),
        ("llama.attention.head_count_kv", "number", "attn_k.weight has shape (16, 32)"),
        ("llama.rope.freq_base", "text", "must be of type float or int"),
        ("llama.rope.freq_base", "texts", "must be of type float or int"),
        ("llama.rope.freq_base", "nan", "rope_theta"),
        ("tokenizer.ggml.token_type", "number", "must be of type list"),
        ("tokenizer.ggml.merges", "numbers", "elements must be of type str"),
        ("tokenizer.ggml.tokens", "arrays", "elements must be of type str"),
        ("tokenizer.ggml.bos_token_id", "text", "must be of type int"),
        ("tokenizer.ggml.bos_token_id", "true", "must be of type int"),
        ("tokenizer.ggml.pre", "texts", "must be of type str"),
        ("tokenizer.chat_template", "number", "must be of type str"),
    ],
)
def test_the_sentence_names_key_and_kind(swap, key, value, words):
    assert any(words in sentence for sentence in complaints(swap(key, VALUES[value])))


def test_arrays_nested_without_end_are_refused_and_not_followed(swap):
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    with pytest.raises(ValueError, match="nests arrays"):
        GGUFHeader(swap("x.deep", nested))
    shallow = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 4, 0)
    assert GGUFHeader(swap("x.deep", shallow)).metadata["x.deep"] == [[[[[[]]]]]]

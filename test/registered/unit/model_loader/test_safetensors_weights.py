from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.safetensors_header import INDEX_FILE, SINGLE_FILE
from sglang.srt.model_loader.safetensors_weights import safetensors_weights


def loaded(folder, dtype=torch.float32):
    return {item.name: item.load(dtype) for item in safetensors_weights(folder)}


def edit_index(folder, change):
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_one_file_and_three_shards_give_the_same_weights(tiny):
    whole, sharded = tiny("whole"), tiny("sharded", shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    want, got = loaded(whole), loaded(sharded)
    assert set(want) == set(got) == set(load_file(whole / SINGLE_FILE))
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_items_name_their_shard_shape_and_size(tiny):
    items = {item.name: item for item in safetensors_weights(tiny(shards=2, dtype="bfloat16"))}
    item = items["model.layers.0.mlp.gate_proj.weight"]
    assert (item.shape, item.nbytes) == ((64, 32), 64 * 32 * 2)
    assert item.file.endswith(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"))
    assert item.load(torch.float32).dtype == torch.float32


def test_a_file_under_another_name_is_taken_when_it_is_the_only_one(tiny):
    folder = tiny()
    (folder / SINGLE_FILE).rename(folder / "weights.safetensors")
    assert "model.norm.weight" in loaded(folder)
    save_file({"x": torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(
        ValueError, match=r"2 safetensors files \(more.safetensors, weights.safetensors\) and no"
    ):
        safetensors_weights(folder)


def test_a_file_cut_anywhere_is_refused_with_both_numbers(tiny):
    """A torn download has the right name and the right beginning."""
    folder = tiny(num_layers=1)
    file = folder / SINGLE_FILE
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in [0, 7, 8, 100, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"model.safetensors is truncated.*\b{length}\b"):
            safetensors_weights(folder)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="truncated or torn"):
        safetensors_weights(folder)


def test_one_torn_shard_is_refused_before_the_first_tensor_comes_out(tiny):
    folder = tiny(shards=2)
    last = folder / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is truncated or torn"):
        safetensors_weights(folder)


def test_a_shard_that_is_not_there_is_named_with_its_first_tensor(tiny):
    folder = tiny(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"index.json places \d+ tensors .*'model-00002-of-00002.safetensors'"
    ):
        safetensors_weights(folder)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(tiny):
    folder = tiny(shards=2)
    edit_index(folder, lambda names: names.update({"model.extra.weight": "model-00001-of-00002.safetensors"}))
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors lacks 1 of .*'model.extra.weight'"
    ):
        safetensors_weights(folder)


def test_a_tensor_that_the_index_does_not_know_is_named(tiny):
    folder = tiny(shards=2)
    edit_index(folder, lambda names: names.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"holds 1 tensors that .* does not place .*'model.norm.weight'"):
        safetensors_weights(folder)


def test_a_file_whose_name_is_no_utf8_is_not_called_damaged(tiny):
    folder = tiny()
    (folder / SINGLE_FILE).rename(folder / "caf\udce9.safetensors")
    with pytest.raises(ValueError, match=r"the weight file .*/caf\\xe9.safetensors is not UTF-8; rename"):
        safetensors_weights(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_files_that_are_not_part_of_the_model_are_named_in_the_log(tiny, caplog, shards):
    """A second set of weights beside the first would be left out, and nobody could tell which one answers."""
    folder = tiny(shards=shards)
    caplog.set_level("INFO")
    want = {item.name for item in safetensors_weights(folder)}
    assert not caplog.messages
    save_file({"x": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert {item.name for item in safetensors_weights(folder)} == want
    (line,) = caplog.messages
    chosen = SINGLE_FILE if shards == 1 else INDEX_FILE
    assert all(word in line for word in (str(folder), "consolidated.safetensors", f"what {chosen} holds"))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_cannot_be_read_is_refused(tiny, content):
    folder = tiny(shards=2)
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match="no readable weight_map"):
        safetensors_weights(folder)


def test_an_index_cannot_point_outside_its_folder(tiny, tmp_path):
    folder = tiny(shards=2)
    save_file({"stolen": torch.zeros(1)}, tmp_path / "outside.safetensors")
    edit_index(folder, lambda names: names.update({"stolen": "../outside.safetensors"}))
    with pytest.raises(ValueError, match="no such file beside it"):
        safetensors_weights(folder)


def test_pickled_weights_are_not_loaded_and_the_message_says_why(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickles, which are not loaded: save the model as safetensors"):
        safetensors_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"holds no safetensors file; fetch the weights into it \("):
        safetensors_weights(tmp_path)


def write_raw(folder, header, data):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"[]", "the header is a list"),
        ({"w": {"dtype": "F32"}}, "row of tensor 'w' is malformed"),
        (
            {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
            r"\[3\] in F32 needs 12 bytes.*gives it 8",
        ),
        ({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, "'w' is stored as I64"),
        ({"w": {"dtype": "I99", "shape": [1], "data_offsets": [0, 8]}}, "'w' is stored as I99"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "model.safetensors is corrupt.*w"),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "vw"},
            "model.safetensors is corrupt",
        ),
        (
            {"__metadata__": 5, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            "model.safetensors is corrupt",
        ),
        (b'{"a":' * 5000, "the header is not JSON"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, header, message):
    write_raw(tmp_path, header, bytes(8))
    with pytest.raises(ValueError, match=message):
        safetensors_weights(tmp_path)

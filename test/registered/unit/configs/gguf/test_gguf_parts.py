"""A GGUF model in several files is the model in one file; one part of it says what is missing."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.gguf import parts as gguf_parts
from sglang.srt.configs.gguf.header import GGUFHeader
from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.model_loader.loader import open_checkpoint
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model

COUNT = 3  # 21 tensors, 8 a part
SHAPE = {"hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "hf", **SHAPE)


@pytest.fixture
def parts(tmp_path, folder):
    """The three files of one model, alone in their folder."""
    (tmp_path / "parts").mkdir()
    return parts_of(folder, tmp_path / "parts")


def parts_of(folder, where, **how):
    first = write_tiny_gguf(folder, where / "m.gguf", **{"part_tensors": 8, **how})
    files = sorted(where.glob("m-*.gguf"))
    assert files[0] == first
    return files


def tensors(path):
    checkpoint = open_checkpoint(ModelConfig.from_path(path), "auto", torch.float32)
    return {item.name: item.load(torch.float32) for item in checkpoint.items}


def patched(file, key, value, kind="<H"):
    """The file with another number under a key of its metadata."""
    raw = bytearray(file.read_bytes())
    at = raw.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    raw[at : at + struct.calcsize(kind)] = struct.pack(kind, value)
    file.write_bytes(raw)


def test_a_split_model_is_the_model_that_was_split(tmp_path, folder, parts):
    whole = write_tiny_gguf(folder)
    assert len(parts) == COUNT
    split, one = ModelConfig.from_path(parts[0]), ModelConfig.from_path(whole)
    named = {"path": 0, "end_sources": 0}  # both name the file
    assert vars(split) | named == vars(one) | named and split.eos_token_ids == one.eos_token_ids
    want, got = load_file(folder / "model.safetensors"), tensors(parts[0])
    assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)
    text = "the quick brown fox"
    assert load_tokenizer(parts[0]).encode(text) == load_tokenizer(whole).encode(text)


def test_any_part_and_the_folder_stand_for_the_whole(parts):
    for given in (*parts, parts[0].parent):
        assert resolve_model_path(given) == parts[0]
        assert ModelConfig.from_path(given, load_format="gguf").path == parts[0]
        assert set(open_gguf(parts[0]).tensors) == set(open_gguf(resolve_model_path(given)).tensors)
    assert load_tokenizer(parts[2]).num_ids == load_tokenizer(parts[0].parent).num_ids == 512


def test_a_first_part_may_hold_metadata_alone(tmp_path, folder):
    """Makers of large models put the metadata into a small file of its own."""
    files = parts_of(folder, tmp_path, bare_first_part=True)
    assert not GGUFHeader(files[0]).tensors
    want = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, want[name]) for name, tensor in tensors(files[0]).items())


def test_items_name_the_part_that_holds_them(parts):
    items = open_checkpoint(ModelConfig.from_path(parts[0]), "auto", torch.float32).items
    assert {item.file for item in items} == {str(file) for file in parts}


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_part_without_the_others_is_called_a_part_and_says_which_are_missing(parts, lost):
    """It is whole; fetching it again, as a damaged file is to be, would change nothing."""
    for number in lost:
        parts[number].unlink()
    for given in (*(file for file in parts if file.exists()), parts[0].parent):
        with pytest.raises(
            ValueError, match=r"is one part of several \(\d of 3 of a split model\)"
        ) as caught:
            ModelConfig.from_path(given)
        named = str(caught.value).partition("not beside it are ")[2].partition("; fetch what is missing")[0]
        assert named == ", ".join(parts[number].name for number in lost)


def test_many_missing_parts_are_counted_and_some_are_named(tmp_path, folder):
    files = parts_of(folder, tmp_path, part_tensors=2)
    for file in files[1:]:
        file.unlink()
    with pytest.raises(
        ValueError, match=r"not beside it are m-00002-of-00011.gguf, .*, m-00005-of-00011.gguf and 6 more;"
    ):
        open_gguf(files[0])


def test_a_torn_part_is_refused_by_its_own_name(parts):
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{parts[1].name} is truncated"):
        ModelConfig.from_path(parts[0])


def test_a_part_under_another_name_is_asked_for_its_own(parts):
    """Parts are found by name, and a copy under the name of another part would stand in for it."""
    renamed = parts[1].rename(parts[1].with_name("download.gguf"))
    with pytest.raises(ValueError, match=r"is part 2 of 3 .* ends in -00002-of-00003.gguf"):
        ModelConfig.from_path(renamed)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ValueError, match=r"m-00002-of-00003.gguf: metadata 'split.no' is 2, .* must be 1"):
        ModelConfig.from_path(parts[0])


def test_parts_of_different_models_are_refused(tmp_path, folder, parts):
    """Two downloads in one folder: names fit, and half of the weights would be of another model."""
    (tmp_path / "other").mkdir()
    other = parts_of(folder, tmp_path / "other", part_tensors=7)
    shutil.copy(other[1], parts[1])
    with pytest.raises(ValueError, match=rf"{parts[1].name}: tensor '.*' is also in .*{parts[0].name}"):
        open_gguf(parts[0])


def test_a_part_that_contradicts_the_first_is_refused(parts):
    patched(parts[2], "split.tensors.count", 20, "<i")
    with pytest.raises(
        ValueError, match=r"m-00003-of-00003.gguf: metadata 'split.tensors.count' is 20, .* 21"
    ):
        open_gguf(parts[0])


def test_tensors_are_counted_over_all_parts(parts):
    for file in parts:
        patched(file, "split.tensors.count", 22, "<i")
    with pytest.raises(ValueError, match="hold 21 tensors, the metadata announces 22"):
        open_gguf(parts[0])


@pytest.mark.parametrize("check", ["_compare", "_all_parts"])
def test_a_set_that_is_not_checked_is_taken(parts, monkeypatch, check):
    """The twin of the refusals above: without the check nothing else would notice."""
    if check == "_compare":
        patched(parts[2], "split.no", 7)
    else:
        parts = [file.rename(file.with_name(f"x{index}.gguf")) for index, file in enumerate(parts)]
    with pytest.raises(ValueError, match="part"):
        open_gguf(parts[0])
    monkeypatch.setattr(gguf_parts, check, lambda *asked: parts)
    assert len(open_gguf(parts[0]).tensors) == 21


def test_a_merged_model_is_whole_under_any_name(tmp_path, folder):
    """Merging leaves a count of 0 behind, and nobody has to rename the result."""
    whole = write_tiny_gguf(folder, tmp_path / "m-00002-of-00003.gguf")
    assert resolve_model_path(whole) == whole and len(open_gguf(whole).tensors) == 21
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(whole.read_bytes())
    assert resolve_model_path(whole) == whole
    with pytest.raises(ValueError, match="2 GGUF models"):
        resolve_model_path(tmp_path)


def test_a_folder_with_parts_of_two_models_is_refused_with_a_name_for_each(folder, parts):
    write_tiny_gguf(folder, parts[0].with_name("other.gguf"))
    with pytest.raises(ValueError, match=r"2 GGUF models \(m-00001-of-00003.gguf, other.gguf\)"):
        resolve_model_path(parts[0].parent)

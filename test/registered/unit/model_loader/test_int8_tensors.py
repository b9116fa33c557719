"""Checkpoints that store int8 weights with their scales: computed as they are, or refused with the reason."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.w8a8_int8 import (
    Int8PanelWeight,
    Int8Weight,
    W8A8Int8Config,
    quantized_channels,
)
from sglang.srt.model_executor.model_runner_components import load_model
from sglang.srt.model_loader.safetensors_weights import safetensors_weights
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

PLAIN = {"quant_method": "w8a8_int8"}
SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    },
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": SCHEME},
    "ignore": ["lm_head"],
}


def write_int8(folder, said, *, flat=False, **shape):
    """The folder of a tiny model whose linear weights are int8; `flat` scales are [out], others [out, 1]."""
    write_tiny_model(folder, **shape)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], scales = quantized_channels(tensors[name])
        tensors[f"{name}_scale"] = scales if flat else scales[:, None].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder


def logits_of(folder, **fields):
    with driven_worker(folder, **fields) as driver:
        logits = driver.logits([(driver.add(list(range(5, 45))), 40)])
        model = driver.target.model_runner.model
        kinds = {type(module.stored) for module in model.model.modules() if hasattr(module, "stored")}
        assert kinds <= {Int8PanelWeight, Int8Weight}
        assert not isinstance(model.lm_head.stored, Int8PanelWeight | Int8Weight)
        return logits


@pytest.mark.parametrize("said", [PLAIN, COMPRESSED], ids=["w8a8_int8", "compressed-tensors"])
@pytest.mark.parametrize("tie", [False, True])
def test_stored_numbers_are_computed_as_they_are_and_the_head_is_not_int8(tmp_path, monkeypatch, said, tie):
    """The same bits as quantizing the float checkpoint by the same rule; no flag is needed."""
    plain = write_tiny_model(tmp_path / "plain", tie=tie)
    stored = write_int8(tmp_path / "stored", said, tie=tie, flat=said is PLAIN)
    found = logits_of(stored)
    assert torch.equal(logits_of(stored, quantization="w8a8_int8"), found)
    monkeypatch.setattr(load_model, "W8A8Int8Config", lambda *, with_head: W8A8Int8Config(with_head=False))
    assert torch.equal(logits_of(plain, quantization="w8a8_int8"), found)


def test_a_weight_of_the_file_may_be_minus_128_and_its_parts_are_read_alone(tmp_path):
    folder = write_int8(tmp_path / "stored", PLAIN)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = -128
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    item = next(item for item in safetensors_weights(folder) if item.name == name)
    numbers, scales = item.load_int8(2, 4)
    assert torch.equal(numbers, tensors[name][2:6]) and numbers[1, 5] == -128
    values = tensors[name].float() * tensors[f"{name}_scale"]
    assert torch.equal(item.load(torch.float32), values)
    assert torch.equal(item.load(torch.float32, 1, 7, 9), values[:, 7:16])
    assert torch.equal(scales, tensors[f"{name}_scale"][2:6, 0])
    assert item.nbytes == tensors[name].nbytes + tensors[f"{name}_scale"].nbytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scales: None, r"is stored as I8, and the checkpoint holds no .*down_proj\.weight_scale"),
        (lambda scales: torch.ones(64, 4), r"weight_scale has shape \(64, 4\); of int8 weights"),
    ],
)
def test_scales_that_are_missing_or_in_groups_are_refused(tmp_path, change, said):
    folder = write_int8(tmp_path / "stored", PLAIN)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    scales = change(tensors.pop(name))
    if scales is not None:
        tensors[name] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        safetensors_weights(folder)


def changed(group=None, **top):
    scheme = {
        part: {**value, **(group or {}).get(part, {})} if isinstance(value, dict) else value
        for part, value in SCHEME.items()
    }
    return {**COMPRESSED, "config_groups": {"group_0": scheme}, **top}


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8"},
        {"quant_method": "w8a8_int8", "is_dynamic": False},
        changed({"weights": {"num_bits": 4}}),
        changed({"weights": {"strategy": "group"}}),
        changed({"weights": {"symmetric": False}}),
        changed({"input_activations": {"dynamic": False}}),
        changed(ignore=["model.layers.0.mlp.down_proj"]),
        changed(kv_cache_scheme={"num_bits": 8}),
        changed(config_groups={}),
        {**COMPRESSED, "config_groups": {"group_0": {**SCHEME, "input_activations": None}}},
        ["w8a8_int8"],
    ],
)
def test_another_way_of_quantizing_is_refused(tmp_path, said):
    folder = write_int8(tmp_path / "stored", said)
    with pytest.raises(ValueError, match=r"quantization_config is set, and of .* only whole models in"):
        ModelConfig.from_path(folder)


def test_what_is_refused_above_is_served_unchanged(tmp_path):
    """The twin: only what each case changes is wrong with it."""
    assert ModelConfig.from_path(write_int8(tmp_path / "stored", changed())).stored_int8
    assert not ModelConfig.from_path(write_tiny_model(tmp_path / "plain")).stored_int8

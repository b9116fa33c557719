from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import dataclasses

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.weights.parameter import WeightItem
from sglang.srt.model_loader.loader import open_checkpoint
from sglang.srt.models.registry import model_class
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_model


@pytest.fixture
def load(tmp_path):
    """Writes a tiny model and loads it with its items changed on the way."""

    def load(change=lambda items: items, **fields):
        folder = write_tiny_model(tmp_path / "model", **fields)
        config = ModelConfig.from_path(folder)
        with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
            model = model_class(config.architecture)(config, dtype=torch.float32)
        model.load_weights(change(open_checkpoint(config, "auto", torch.float32).items))
        return model

    return load


def item(name, shape, file="other.safetensors", value=0.0):
    return WeightItem(name, file, shape, lambda dtype: torch.full(shape, value, dtype=dtype), 4)


def test_a_missing_tensor_is_an_error_that_names_it(load):
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight \(32, 64\)"):
        load(lambda items: [i for i in items if "1.self_attn.k_proj" not in i.name])


def test_many_missing_tensors_are_counted_and_some_are_named(load):
    with pytest.raises(ValueError, match=r"(?s)9 tensors are missing.*layers\.0\..* and 4 more"):
        load(lambda items: [i for i in items if "layers.0." not in i.name])


def test_a_tensor_that_nobody_wants_is_an_error(load):
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*other.*\(2, 3\)"):
        load(lambda items: [*items, item("model.layers.2.mlp.up_proj.weight", (2, 3))])


def test_a_wrong_shape_names_tensor_file_and_both_shapes_and_reads_nothing(load):
    def unreadable(dtype):
        raise AssertionError("the bytes of a tensor with a wrong shape were read")

    def change(items):
        return [
            dataclasses.replace(i, shape=(128, 63), load=unreadable)
            if i.name.endswith("1.mlp.up_proj.weight")
            else i
            for i in items
        ]

    with pytest.raises(
        ValueError, match=r"1\.mlp\.up_proj\.weight.*model\.safetensors.*\(128, 63\).*\(128, 64\)"
    ):
        load(change)


def test_a_transposed_square_or_a_lying_header_is_caught_after_reading(load):
    def change(items):
        return [
            dataclasses.replace(i, load=lambda dtype: torch.zeros(64, 32)) if "k_proj" in i.name else i
            for i in items
        ]

    with pytest.raises(ValueError, match=r"k_proj.*\(64, 32\).*\(32, 64\)"):
        load(change)


def test_a_tensor_that_comes_twice_is_an_error_that_names_both_files(load):
    with pytest.raises(ValueError, match=r"model\.norm\.weight in other.*already loaded from .*model"):
        load(lambda items: [*items, item("model.norm.weight", (64,))])


def test_an_untied_model_without_a_head_is_refused(load):
    with pytest.raises(ValueError, match=r"lm_head\.weight \(512, 64\)"):
        load(lambda items: [i for i in items if i.name != "lm_head.weight"])


def test_a_tied_model_needs_no_head_and_has_no_parameter_for_one(load):
    model = load(tie=True)
    assert "lm_head.weight" not in dict(model.named_parameters())
    embedding, scored = model.model.embed_tokens, model.lm_head.stored.unpack()
    assert torch.equal(embedding(torch.arange(len(scored))), scored)


def test_a_fused_weight_holds_its_parts_in_order(load):
    model = load()
    config = model.config
    items = {i.name: i.load(torch.float32) for i in open_checkpoint(config, "auto", torch.float32).items}
    layer = model.model.layers[1]
    prefix = "model.layers.1."
    qkv = torch.cat([items[f"{prefix}self_attn.{p}_proj.weight"] for p in "qkv"])
    gate_up = torch.cat([items[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    for linear, expected in ((layer.self_attn.qkv_proj, qkv), (layer.mlp.gate_up_proj, gate_up)):
        assert torch.equal(linear.stored.unpack(), expected)


@pytest.mark.parametrize("rank, lines", [(0, 1), (1, 0)])
def test_padded_heads_are_said_once_and_by_one_rank(tmp_path, caplog, rank, lines):
    config = ModelConfig.from_path(write_tiny_model(tmp_path / "model", num_heads=9, num_kv_heads=3))
    with (
        caplog.at_level("INFO"),
        published_topology(tp_size=2, ranks={"world_rank": rank, "dp_rank": None}),
    ):
        model_class(config.architecture)(config, dtype=torch.float32)
    said = [record.message for record in caplog.records if "heads" in record.message]
    assert len(said) == lines
    assert all("9 query and 3 key/value heads over 2 ranks: padded to 12 and 4" in line for line in said)


def test_biases_are_loaded_and_added(tmp_path):
    """Llama with attention and feed-forward biases, against the reference with the same weights."""
    transformers = pytest.importorskip("transformers")
    from sglang.test.worker_driver import driven_worker

    folder = write_tiny_model(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder, attention_bias=True, mlp_bias=True)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in theirs.named_parameters():
        parameter.data = torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.2)
    theirs.save_pretrained(folder)
    ids = list(range(30, 50))
    with driven_worker(folder) as driver, torch.inference_mode():
        ours = driver.logits([(driver.add(ids), 20)])
        assert (ours[0] - theirs(torch.tensor([ids])).logits[0, -1]).abs().max() < 1e-4

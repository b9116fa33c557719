"""A draft's files: what is read from them, what the tensors overrule, and which drafts do not fit a model."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import dataclasses
import json

import pytest

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.draft_folders import write_draft_folder

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def model_folder(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}), encoding="utf-8")
    return folder


@pytest.fixture
def target(tmp_path):
    """The config of a model of these changes."""

    def build(*, context_length=None, **changes):
        return ModelConfig.from_path(
            model_folder(tmp_path / "target", **changes), context_length=context_length
        )

    return build


@pytest.fixture
def read(tmp_path, target):
    """Write a draft of `kind` and read it for a model."""

    def build(kind, *, model=None, load_format="auto", **draft):
        folder = write_draft_folder(tmp_path / "draft", kind, **draft)
        return DraftConfig.from_path(folder, kind=kind, target=model or target(), load_format=load_format)

    return build


def test_an_eagle3_draft_is_read_with_its_captures_and_its_own_vocabulary(read, tmp_path):
    draft = read("eagle3", draft_vocab_size=100)
    head = draft.head
    assert (draft.kind, draft.model.architecture) == ("eagle3", "LlamaForCausalLMEagle3")
    assert draft.model.path == tmp_path / "draft"
    assert (draft.model.num_layers, draft.model.hidden_size, draft.model.head_dim) == (1, 64, 16)
    assert (head.aux_layers, head.target_hidden_size, head.feature_width) == ((1, 3, 4), 64, 192)
    assert (head.draft_vocab_size, draft.has_reduced_vocabulary, head.tied_head) == (100, True, False)
    assert (head.fc_inputs, head.fc_bias, head.norm_output) == (192, False, False)
    assert (head.norm_before_fc, head.norm_each_capture) == (False, False)


def test_an_eagle_draft_fuses_the_embedding_with_one_hidden_row(read):
    draft = read("eagle")
    head = draft.head
    assert (draft.kind, draft.model.architecture) == ("eagle", "LlamaForCausalLMEagle")
    assert (head.aux_layers, head.feature_width, head.fc_inputs, head.fc_bias) == ((), 64, 128, True)
    assert (head.draft_vocab_size, draft.has_reduced_vocabulary) == (None, False)


def test_a_standalone_draft_is_a_model_like_any_other(target, tmp_path):
    folder = model_folder(
        tmp_path / "draft", num_hidden_layers=2, hidden_size=32, max_position_embeddings=1024
    )
    draft = DraftConfig.from_path(folder, kind="standalone", target=target())
    assert (draft.kind, draft.head, draft.model.num_layers, draft.model.hidden_size) == (
        "standalone",
        None,
        2,
        32,
    )
    assert draft.model.context_len == 512 and not draft.has_reduced_vocabulary


@pytest.mark.parametrize(
    ("layers", "captured"),
    [(4, (1, 1, 0)), (5, (1, 1, 1)), (30, (1, 14, 26)), (32, (1, 15, 28))],
)
def test_the_captured_layers_follow_from_the_models_depth(read, target, layers, captured):
    assert read("eagle3", model=target(num_hidden_layers=layers)).head.aux_layers == captured


def test_the_captured_layers_may_be_stated(read):
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7], "use_aux_hidden_state": True}}
    head = read("eagle3", captures=2, config=config).head
    assert (head.aux_layers, head.feature_width, head.fc_inputs) == ((0, 7), 128, 128)


def test_without_captured_layers_the_last_hidden_row_is_read_and_nothing_is_fused(read):
    head = read(
        "eagle3", config={"eagle_config": {"use_aux_hidden_state": False}}, tensors={"fc.weight": None}
    ).head
    assert (head.aux_layers, head.feature_width, head.fc_inputs) == ((), 64, None)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("norm_output", "norm_output"),
        ("norm_before_fc", "norm_before_fc"),
        ("fc_norm", "norm_each_capture"),
        ("use_aux_norm", "norm_each_capture"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_options_of_a_head_are_read_wherever_the_config_has_them(read, key, field, nested):
    said = {key: True}
    head = read("eagle3", config={"eagle_config": said} if nested else said).head
    changed = {item.name for item in dataclasses.fields(head)} - {field}
    plain = read("eagle3").head
    assert getattr(head, field) is True
    assert all(getattr(head, name) == getattr(plain, name) for name in changed)


def test_the_bias_of_the_fusion_is_what_the_tensors_have(read):
    """Published configs leave the key out or copy it from elsewhere."""
    assert read("eagle", config={"bias": False}).head.fc_bias is True
    assert read("eagle", config={"bias": True}, tensors={"fc.bias": None}).head.fc_bias is False


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
def test_the_layers_are_counted_in_the_tensors_whatever_the_config_says(read, prefix):
    name = "self_attn.o_proj.weight"
    rename = {f"midlayer.{name}": None, "midlayer.hidden_norm.weight": None, prefix + name: (64, 64)}
    assert read("eagle3", config={"num_hidden_layers": 36}, tensors=rename).model.num_layers == 1
    rename |= {"layers.1.self_attn.o_proj.weight": (64, 64)}
    assert read("eagle3", config={"num_hidden_layers": 1}, tensors=rename).model.num_layers == 2


def test_a_dummy_draft_has_what_its_config_says_and_needs_no_weights(read, tmp_path):
    config = {"num_hidden_layers": 3, "bias": True}
    wrong = {"fc.weight": (1, 1)}
    draft = read("eagle3", config=config, tensors=wrong, load_format="dummy")
    assert (draft.model.num_layers, draft.head.fc_bias) == (3, True)


def test_positions_reach_as_far_as_the_models(read, target):
    """Published drafts often say a short reach, and their rows stand at the model's positions."""
    model = target(context_length=200)
    for kind in ("eagle", "eagle3"):
        draft = read(kind, model=model, config={"max_position_embeddings": 32})
        assert (draft.model.max_position_embeddings, draft.model.context_len) == (512, 200)
        assert read(kind, model=model, config={"max_position_embeddings": ...}).model == draft.model


def test_a_head_over_the_whole_vocabulary_is_the_models_or_the_drafts(read):
    shared = read("eagle3")
    assert (shared.head.draft_vocab_size, shared.head.tied_head) == (None, False)
    own = read("eagle3", draft_vocab_size=300, tensors={"d2t": None})
    assert (own.head.draft_vocab_size, own.has_reduced_vocabulary) == (300, False)
    tied = read("eagle3", config={"tie_word_embeddings": True})
    assert (tied.head.draft_vocab_size, tied.head.tied_head) == (None, True)


@pytest.mark.parametrize(
    ("kind", "draft", "words"),
    [
        ("eagle3", {"hidden_size": 32}, r"the draft's hidden_size is 32, and the model .*target has 64"),
        ("eagle", {"hidden_size": 32}, r"the draft's hidden_size is 32, and the model .*target has 64"),
        ("eagle3", {"config": {"target_hidden_size": 96}}, r"target_hidden_size is 96, .* has 64"),
        ("eagle3", {"vocab_size": 400}, r"the draft's vocab_size is 400, .* has 300"),
        ("eagle", {"vocab_size": 200}, r"the draft's vocab_size is 200, .* has 300"),
        ("eagle3", {"draft_vocab_size": 301}, r"draft_vocab_size 301 is above the vocabulary of 300"),
        ("eagle3", {"captures": 2}, r"fc.weight has the shape \[64, 128\], .* ask for \[64, 192\]"),
        (
            "eagle",
            {"tensors": {"fc.weight": (64, 64)}},
            r"fc.weight has the shape \[64, 64\], .* \[64, 128\]",
        ),
        ("eagle3", {"tensors": {"fc.weight": None}}, r"has no tensor fc.weight, .* \[64, 192\]"),
        (
            "eagle3",
            {"draft_vocab_size": 100, "tensors": {"lm_head.weight": (90, 64)}},
            r"lm_head.weight has the shape \[90, 64\], .* \[100, 64\]",
        ),
        ("eagle3", {"draft_vocab_size": 100, "tensors": {"d2t": None}}, r"has no tensor d2t, .*\[100\]"),
        ("eagle3", {"draft_vocab_size": 100, "tensors": {"d2t": (99,)}}, r"d2t has the shape \[99\]"),
        (
            "eagle3",
            {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8]}}},
            r"layers \[1, 8\] of the model \(in eagle_aux_hidden_state_layer_ids\), .* layers 0 to 7",
        ),
        (
            "eagle3",
            {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}},
            r"layer_ids is \[\]; it must be a list of layer ids",
        ),
        ("eagle3", {"config": {"num_aux_hidden_states": 2}}, r"num_aux_hidden_states is 2, .*\[1, 3, 4\]"),
        ("eagle3", {"config": {"eagle_config": [1]}}, r"eagle_config is \[1\]; it must be an object"),
        ("eagle3", {"config": {"hidden_act": "gelu"}}, r"hidden_act 'gelu' is not served"),
        ("eagle3", {"config": {"quantization_config": {"bits": 4}}}, r"quantization_config is set"),
        ("eagle3", {"load_format": "gguf"}, r"--speculative-draft-load-format gguf is for STANDALONE"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_the_numbers(read, kind, draft, words):
    with pytest.raises(ValueError, match=words):
        read(kind, **draft)


def test_a_model_that_is_too_shallow_for_the_default_captures_is_named(read, target):
    with pytest.raises(
        ValueError, match=r"layers \[1, 0, -2\] of the model \(by default\), .* layers 0 to 1;"
    ):
        read("eagle3", model=target(num_hidden_layers=2))


def test_a_draft_without_weights_is_refused_by_its_folder(target, tmp_path):
    folder = write_draft_folder(tmp_path / "draft", "eagle3")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draft holds no safetensors file"):
        DraftConfig.from_path(folder, kind="eagle3", target=target())


@pytest.mark.parametrize("found", ["eagle", "eagle3", "standalone"])
@pytest.mark.parametrize("asked", ["eagle", "eagle3", "standalone"])
def test_a_draft_of_another_kind_is_named_with_the_algorithm_it_is_for(target, tmp_path, asked, found):
    folder = tmp_path / "draft"
    if found == "standalone":
        model_folder(folder)
    else:
        write_draft_folder(folder, found)
    if asked == found:
        assert DraftConfig.from_path(folder, kind=asked, target=target()).kind == asked
        return
    words = (
        f"drafts for {found.upper()} and not for {asked.upper()}; use --speculative-algorithm {found.upper()}"
    )
    with pytest.raises(ValueError, match=words):
        DraftConfig.from_path(folder, kind=asked, target=target())


def test_a_model_of_an_unknown_class_is_refused_as_a_model(target, tmp_path):
    folder = model_folder(tmp_path / "draft", architectures=["MambaForCausalLM"])
    with pytest.raises(ValueError, match=r"MambaForCausalLM.* is not served"):
        DraftConfig.from_path(folder, kind="standalone", target=target())


def test_a_standalone_draft_must_reach_as_far_as_the_model(target, tmp_path):
    folder = model_folder(tmp_path / "draft", max_position_embeddings=128)
    with pytest.raises(ValueError, match=r"reads 128 tokens, and the model 512; .* --context-length to 128"):
        DraftConfig.from_path(folder, kind="standalone", target=target())
    assert (
        DraftConfig.from_path(folder, kind="standalone", target=target(context_length=128)).model.context_len
        == 128
    )


def test_a_path_that_does_not_exist_is_named_by_its_setting(target):
    with pytest.raises(ValueError, match="--speculative-draft-model-path 'no/such/folder/'"):
        DraftConfig.from_path("no/such/folder/", kind="eagle3", target=target())

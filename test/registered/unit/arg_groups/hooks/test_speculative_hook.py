"""Speculative decoding at the door: what is chosen where nothing is said, and what is refused."""

from sglang.kernels import compiled
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import json
import logging

import pytest

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.arg_groups.overrides import declared_provenance, resolution_result
from sglang.srt.arg_groups.speculative_algorithms import ALGORITHMS, ALIASES, LATER, facts_of
from sglang.srt.arg_groups.supported import refuse_unserved
from sglang.srt.server_args import ServerArgs
from sglang.test.draft_folders import write_draft_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def shape_of(record):
    return tuple(resolution_result(record, name) for name in SHAPE)


@pytest.fixture
def model(tmp_path):
    """A model folder of these changes."""

    def build(name="model", **changes):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
        return folder

    return build


@pytest.fixture
def drafting(resolved, model, tmp_path):
    """A resolved record that drafts; the draft of the algorithm is written unless a path is stated.

    Settings are written without `speculative_`; `ngram_...` ones too. `draft` changes the draft's folder.
    """

    def build(algorithm, *, draft=None, target=None, **settings):
        fields = {
            f"speculative_{name}" if f"speculative_{name}" in LEAVES else name: value
            for name, value in settings.items()
        }
        kind = facts_of(algorithm).draft
        if kind == "standalone":
            fields.setdefault("speculative_draft_model_path", model("draft", **(draft or {})))
        elif kind is not None and "speculative_draft_model_path" not in fields:
            folder = write_draft_folder(tmp_path / "draft", kind, **(draft or {}))
            fields["speculative_draft_model_path"] = folder
        return resolved(model_path=model(**(target or {})), speculative_algorithm=algorithm, **fields)

    return build


def adaptive_file(tmp_path, *steps):
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": list(steps)}}), encoding="utf-8")
    return str(path)


LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("algorithm", "architecture", "said", "chosen"),
    [
        ("EAGLE", LLAMA, {}, (5, 4, 8)),
        ("EAGLE", QWEN, {}, (3, 1, 4)),
        ("NEXTN", LLAMA, {}, (5, 4, 8)),
        ("EAGLE3", LLAMA, {}, (5, 4, 8)),
        ("EAGLE3", QWEN, {}, (3, 1, 4)),
        ("STANDALONE", LLAMA, {}, (3, 1, 4)),
        ("STANDALONE", QWEN, {}, (3, 1, 4)),
        ("NGRAM", LLAMA, {}, (1, 10, 12)),
        ("NGRAM", LLAMA, {"num_draft_tokens": 16, "ngram_max_bfs_breadth": 4}, (4, 4, 16)),
        ("NGRAM", LLAMA, {"num_draft_tokens": 4}, (1, 10, 4)),
        ("NGRAM", LLAMA, {"eagle_topk": 10, "num_steps": 1}, (1, 10, 12)),
        # Rejection sampling judges chains, so the automatic choice is one.
        ("EAGLE", LLAMA, {"use_rejection_sampling": True}, (3, 1, 4)),
        ("EAGLE3", LLAMA, {"use_block_verification": True}, (3, 1, 4)),
        # A chain says its width.
        ("EAGLE3", LLAMA, {"num_steps": 2, "eagle_topk": 1}, (2, 1, 3)),
        ("EAGLE3", LLAMA, {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3}, (2, 1, 3)),
        ("EAGLE3", LLAMA, {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 37}, (3, 4, 37)),
        ("STANDALONE", LLAMA, {"num_steps": 1, "eagle_topk": 4, "num_draft_tokens": 5}, (1, 4, 5)),
        ("EAGLE3", LLAMA, {"adaptive": True}, (3, 1, 4)),
        ("EAGLE", LLAMA, {"adaptive": True, "num_steps": 5}, (5, 1, 6)),
        ("EAGLE", LLAMA, {"adaptive": True, "eagle_topk": 1, "num_draft_tokens": 4}, (3, 1, 4)),
    ],
)
def test_what_is_drafted_in_a_round(drafting, algorithm, architecture, said, chosen):
    record = drafting(algorithm, target={"architectures": [architecture], "head_dim": 16}, **said)
    assert shape_of(record) == chosen
    signed = {item.source for item in declared_provenance(record) if item.name in SHAPE}
    assert signed <= {"speculative_hook"}


def test_an_adaptive_draft_starts_in_the_middle_of_its_depths(drafting, tmp_path):
    for steps, chosen in (((2,), 2), ((1, 4), 4), ((6, 0, 2), 2), ((0, 1), 1)):
        record = drafting("EAGLE3", adaptive=True, adaptive_config=adaptive_file(tmp_path, *steps))
        assert shape_of(record) == (chosen, 1, chosen + 1)


def test_an_adaptive_draft_that_could_never_draft_is_refused(drafting, tmp_path):
    with pytest.raises(ValueError, match=r"--speculative-adaptive-config .* has no depth but 0, so nothing"):
        drafting("EAGLE3", adaptive=True, adaptive_config=adaptive_file(tmp_path, 0))


@pytest.mark.parametrize("name", ["eagle3", "Eagle3", "EAGLE3"])
def test_the_name_of_an_algorithm_may_be_written_in_any_case(drafting, name):
    assert resolution_result(drafting(name), "speculative_algorithm") == "EAGLE3"


def test_nextn_is_another_name_of_eagle(drafting):
    assert resolution_result(drafting("nextn"), "speculative_algorithm") == "EAGLE"


def test_without_an_algorithm_nothing_is_decided(resolved):
    record = resolved()
    assert not [item for item in declared_provenance(record) if "speculative" in item.name]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *ALIASES])
def test_no_algorithm_lowers_the_number_of_running_requests(drafting, algorithm):
    assert resolution_result(drafting(algorithm), "max_running_requests") == 256


def test_block_verification_turns_rejection_sampling_on(drafting):
    record = drafting("EAGLE3", use_block_verification=True)
    assert resolution_result(record, "speculative_use_rejection_sampling") is True
    assert resolution_result(drafting("EAGLE3"), "speculative_use_rejection_sampling") is False


def test_a_draft_is_made_up_where_the_model_is_and_both_are_models(drafting):
    """A head is no model: nobody knows what tensors it would have without its file."""
    for algorithm, made_up in (("STANDALONE", "dummy"), ("EAGLE3", "auto"), ("EAGLE", "auto")):
        for format, chosen in (("auto", "auto"), ("safetensors", "auto"), ("dummy", made_up)):
            record = drafting(algorithm, load_format=format)
            assert resolution_result(record, "speculative_draft_load_format") == chosen
    record = drafting("STANDALONE", load_format="dummy", draft_load_format="auto")
    assert resolution_result(record, "speculative_draft_load_format") == "auto"


@pytest.mark.parametrize(("said", "warned"), [(8, True), (4, False), (None, False)])
def test_the_width_of_a_chain_follows_from_its_depth_and_a_change_is_said(drafting, caplog, said, warned):
    caplog.set_level(logging.WARNING)
    record = drafting("EAGLE3", num_steps=3, eagle_topk=1, num_draft_tokens=said)
    assert shape_of(record) == (3, 1, 4)
    assert ["--speculative-num-draft-tokens 8 becomes 4" in text for text in caplog.messages] == [
        True
    ] * warned


REFUSED = [
    # Names.
    (
        "EAGEL",
        {},
        r"Unknown speculative algorithm name 'EAGEL'; known: EAGLE, EAGLE3, STANDALONE, NGRAM, NEXTN",
    ),
    ("", {}, r"Unknown speculative algorithm name ''"),
    ("dflash", {}, r"--speculative-algorithm dflash is not served yet; use EAGLE3, EAGLE or STANDALONE"),
    ("DSPARK", {}, r"--speculative-algorithm DSPARK is not served yet; .*NGRAM"),
    # Settings without what they belong to.
    (
        None,
        {"num_steps": 3},
        r"--speculative-num-steps: no effect without --speculative-algorithm; .* leave it",
    ),
    (
        None,
        {"eagle_topk": 1, "draft_model_path": "x"},
        r"--speculative-draft-model-path, --speculative-eagle-topk: no effect .* leave them out",
    ),
    ("EAGLE3", {"ngram_capacity": 5000}, r"--speculative-ngram-capacity has no effect with EAGLE3; .* NGRAM"),
    ("NGRAM", {"draft_model_path": "x"}, r"--speculative-draft-model-path has no effect with NGRAM"),
    ("NGRAM", {"draft_load_format": "auto"}, r"--speculative-draft-load-format has no effect with NGRAM"),
    ("NGRAM", {"draft_attention_backend": "torch_native"}, r"--speculative-draft-attention-backend has no"),
    ("NGRAM", {"draft_kv_cache_dtype": "auto"}, r"--speculative-draft-kv-cache-dtype has no effect"),
    ("EAGLE3", {"adaptive_config": "x"}, r"--speculative-adaptive-config has no effect without"),
    # A missing draft.
    (
        "EAGLE",
        {"draft_model_path": None},
        r"EAGLE needs a draft; give its folder as --speculative-draft-model",
    ),
    ("EAGLE3", {"draft_model_path": None}, r"EAGLE3 needs a draft; .*, or use NGRAM"),
    ("STANDALONE", {"draft_model_path": None}, r"STANDALONE needs a draft"),
    (
        "EAGLE3",
        {"draft_model_path": ""},
        r"--speculative-draft-model-path is empty; give the folder of an EAGLE3 draft$",
    ),
    # Steps, branches, tokens.
    (
        "EAGLE3",
        {"num_steps": 3},
        r"stated together or left out together, got 3, None and None; .* 5, 4, 8 for",
    ),
    ("STANDALONE", {"eagle_topk": 2}, r"got None, 2 and None; left out, they are 3, 1, 4 for this model"),
    ("EAGLE3", {"num_draft_tokens": 4}, r"got None, None and 4"),
    ("EAGLE3", {"eagle_topk": 1, "num_draft_tokens": 4}, r"got None, 1 and 4"),
    ("EAGLE3", {"num_steps": 3, "eagle_topk": 2}, r"got 3, 2 and None"),
    ("EAGLE3", {"num_steps": 0, "eagle_topk": 1}, r"--speculative-num-steps must be at least 1, got 0"),
    ("EAGLE3", {"num_steps": 3, "eagle_topk": 0}, r"--speculative-eagle-topk must be at least 1, got 0"),
    ("NGRAM", {"num_draft_tokens": 1}, r"--speculative-num-draft-tokens must be at least 2, got 1"),
    (
        "EAGLE3",
        {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 38},
        r"1 \+ topk \+ \(steps - 1\) \* topk\*\*2 must hold: .* 38, .* 3 with .* 4 find at most 37",
    ),
    (
        "STANDALONE",
        {"num_steps": 8, "eagle_topk": 4, "num_draft_tokens": 8},
        r"speculative_num_steps < speculative_num_draft_tokens must hold: .* 8 is at most 7 deep, .* is 8",
    ),
    ("EAGLE3", {"draft_load_format": "dummy"}, r"dummy makes the tensors of a whole model, and EAGLE3"),
    ("NGRAM", {"ngram_max_trie_depth": 129}, r"-trie-depth must be at least 2 and at most 128, got 129"),
    (
        "EAGLE3",
        {"num_steps": 511, "eagle_topk": 1},
        r"speculative_num_draft_tokens < context_length must hold: .* 512 tokens, and the context is 512",
    ),
    ("NGRAM", {"num_draft_tokens": 600}, r"up to 600 tokens, and the context is 512"),
    (
        "EAGLE3",
        {"num_steps": 2, "eagle_topk": 101, "num_draft_tokens": 8, "draft": {"draft_vocab_size": 100}},
        r"--speculative-eagle-topk 101 is above the 100 tokens that .*draft proposes",
    ),
    # N-grams.
    (
        "NGRAM",
        {"ngram_min_bfs_breadth": 4, "ngram_max_bfs_breadth": 3},
        r"<= .* must hold: .*breadth 4, .* 3",
    ),
    ("NGRAM", {"ngram_max_bfs_breadth": 0}, r"--speculative-ngram-max-bfs-breadth must be at least 1"),
    (
        "NGRAM",
        {"ngram_capacity": 17},
        r"must hold, or no n-gram fits: .* 18, --speculative-ngram-capacity 17",
    ),
    (
        "NGRAM",
        {"ngram_max_trie_depth": 1},
        r"--speculative-ngram-max-trie-depth must be at least 2 and at most 128, got 1",
    ),
    ("NGRAM", {"ngram_match_type": "DFS"}, r"--speculative-ngram-match-type 'DFS' is not one of BFS, PROB"),
    ("NGRAM", {"eagle_topk": 4}, r"--speculative-eagle-topk 4 has no effect with NGRAM"),
    ("NGRAM", {"num_steps": 5}, r"--speculative-num-steps 5 has no effect with NGRAM"),
    # Acceptance.
    ("EAGLE3", {"accept_threshold_single": 1.1}, r"--speculative-accept-threshold-single must be at least 0"),
    ("EAGLE3", {"accept_threshold_acc": -0.1}, r"--speculative-accept-threshold-acc must be at least 0"),
    (
        "STANDALONE",
        {"use_rejection_sampling": True},
        r"--speculative-use-rejection-sampling works with EAGLE and EAGLE3, not with STANDALONE",
    ),
    (
        "NGRAM",
        {"use_block_verification": True},
        r"block-verification works with EAGLE and EAGLE3, not with NGRAM",
    ),
    (
        "EAGLE3",
        {"use_rejection_sampling": True, "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
        r"--speculative-use-rejection-sampling judges chains, and --speculative-eagle-topk is 2",
    ),
    (
        "EAGLE",
        {"use_block_verification": True, "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
        r"--speculative-use-block-verification judges chains",
    ),
    (
        "EAGLE3",
        {"use_rejection_sampling": True, "accept_threshold_single": 0.5},
        r"threshold-single 0.5 and --speculative-use-rejection-sampling cannot be combined",
    ),
    (
        "EAGLE3",
        {"use_block_verification": True, "accept_threshold_acc": 0.5},
        r"acc 0.5 and .*block-verification",
    ),
    (
        "EAGLE3",
        {"use_rejection_sampling": True, "draft": {"draft_vocab_size": 100}},
        r"needs a draft of the whole vocabulary, and .*draft proposes 100 of 300 tokens",
    ),
    # Adaptive depth.
    ("NGRAM", {"adaptive": True}, r"--speculative-adaptive works with EAGLE and EAGLE3, not with NGRAM"),
    (
        "STANDALONE",
        {"adaptive": True},
        r"--speculative-adaptive works with EAGLE and EAGLE3, not with STANDALONE",
    ),
    ("EAGLE3", {"adaptive": True, "eagle_topk": 2}, r"drafts chains, and --speculative-eagle-topk is 2"),
    ("EAGLE3", {"adaptive": True, "num_steps": 4}, r"num-steps 4 is none of the depths .*\(0, 1, 3, 5, 7\)"),
    (
        "EAGLE3",
        {"adaptive": True, "adaptive_config": "no/such"},
        r"--speculative-adaptive-config no/such cannot",
    ),
    (
        "EAGLE3",
        {"adaptive": True, "tp_size": 2, "attn_dp_size": 2},
        r"--speculative-adaptive and --attn-dp-size 2 cannot be combined",
    ),
    # Layouts.
    ("EAGLE3", {"tp_size": 2, "attn_cp_size": 2}, r"--attn.*cp.* 2 and a draft model \(EAGLE3\) cannot be"),
    ("STANDALONE", {"tp_size": 2, "dcp_size": 2}, r"--dcp-size 2 and a draft model \(STANDALONE\)"),
    (
        "STANDALONE",
        {"tp_size": 4, "draft": {"num_attention_heads": 2}},
        r"4 ranks .* the 2 query heads of .*draft",
    ),
    # The files of the draft.
    ("EAGLE3", {"draft": {"hidden_size": 32}}, r"the draft's hidden_size is 32, and the model .* has 64"),
    ("EAGLE3", {"draft": {"vocab_size": 301}}, r"the draft's vocab_size is 301"),
    ("STANDALONE", {"draft": {"max_position_embeddings": 64}}, r"reads 64 tokens, and the model 512"),
    (
        "STANDALONE",
        {"draft_model_path": "no-draft"},
        r"--speculative-draft-model-path 'no-draft' does not exist; give a folder, a .gguf file or an alias",
    ),
    (
        "EAGLE3",
        {"draft_model_path": "no-draft"},
        r"--speculative-draft-model-path 'no-draft' does not exist; give the folder of an EAGLE3 draft$",
    ),
    ("STANDALONE", {"draft_model_path": "some/draft"}, r"--speculative-draft-model-path 'some/draft' .* hub"),
    (
        "STANDALONE",
        {"skip_tokenizer_init": True, "draft": {"vocab_size": 310}},
        r"a vocabulary of 310 and the model one of 300, and with --skip-tokenizer-init",
    ),
    (
        "EAGLE3",
        {"draft_model_revision": "main"},
        r"--speculative-draft-model-revision main is not served yet",
    ),
    (
        "EAGLE3",
        {"draft_load_format": "npcache"},
        r"--speculative-draft-load-format npcache is not served yet",
    ),
    (
        "EAGLE3",
        {"draft_model_quantization": "fp8"},
        r"--speculative-draft-model-quantization fp8 is not served",
    ),
    (
        "EAGLE3",
        {"draft_model_quantization": "gguf"},
        r"quantization gguf needs a GGUF file, and .*draft holds none",
    ),
    (
        "EAGLE3",
        {"draft_model_quantization": "w8a8_int8"},
        r"quantization w8a8_int8 quantizes a whole model, and EAGLE3 drafts with a head",
    ),
]


@pytest.mark.parametrize(("algorithm", "settings", "words"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_cure(drafting, model, resolved, algorithm, settings, words):
    stated = {f"speculative_{name}": value for name, value in settings.items()}
    with pytest.raises(ValueError, match=words):
        if algorithm in {*ALGORITHMS, *ALIASES}:
            drafting(algorithm, **settings)
        else:
            resolved(model_path=model(), speculative_algorithm=algorithm, **stated)


ACCEPTED = [
    ("NGRAM", {"tp_size": 2, "attn_cp_size": 2}),
    ("NGRAM", {"tp_size": 2, "dcp_size": 2}),
    ("NGRAM", {"tp_size": 2, "attn_dp_size": 2}),
    ("STANDALONE", {"tp_size": 2, "attn_dp_size": 2}),
    ("EAGLE", {"tp_size": 2, "attn_dp_size": 2}),
    ("EAGLE3", {"tp_size": 2, "attn_dp_size": 2}),
    ("EAGLE3", {"dp_size": 2, "adaptive": True}),
    ("EAGLE3", {"page_size": 16, "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8}),
    ("EAGLE3", {"draft": {"draft_vocab_size": 100}}),
    ("EAGLE3", {"use_rejection_sampling": True, "draft": {"draft_vocab_size": 300}}),
    ("EAGLE3", {"accept_threshold_single": 0.5, "accept_threshold_acc": 0.9}),
    ("STANDALONE", {"accept_threshold_single": 0}),
    ("STANDALONE", {"skip_tokenizer_init": True}),
    ("STANDALONE", {"draft": {"vocab_size": 310}}),
    (
        "EAGLE3",
        {"num_steps": 2, "eagle_topk": 100, "num_draft_tokens": 8, "draft": {"draft_vocab_size": 100}},
    ),
    ("NGRAM", {"ngram_min_bfs_breadth": 3, "ngram_max_bfs_breadth": 3, "ngram_capacity": 18}),
    ("NGRAM", {"ngram_match_type": "PROB", "num_draft_tokens": 2}),
]


@pytest.mark.parametrize(("algorithm", "settings"), ACCEPTED)
def test_the_neighbours_of_what_is_refused_resolve(drafting, algorithm, settings):
    """The twins of the list above: each rule refuses what it names and nothing beside it."""
    assert resolution_result(drafting(algorithm, **settings), "speculative_algorithm") == algorithm


def test_thresholds_that_change_the_answers_are_announced(drafting, caplog):
    """Acceptance below 1 is lossy by design; nobody should find that out from the answers."""
    drafting("EAGLE3")
    assert not caplog.records
    drafting("EAGLE3", accept_threshold_acc=0.9)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("--speculative-accept-threshold-acc 0.9 is below 1: sampled answers")


@pytest.mark.parametrize("switch", ["rejection-sampling", "block-verification"])
def test_a_seed_that_neighbours_can_change_is_announced(drafting, caplog, switch):
    """Depths follow the batch, and these rules draw by depth: a seed would change its text unannounced."""
    rule = {"use_" + switch.replace("-", "_"): True}
    drafting("EAGLE", adaptive=True)
    drafting("EAGLE", **rule)
    assert not caplog.records
    drafting("EAGLE", adaptive=True, **rule)
    (line,) = (record.getMessage() for record in caplog.records)
    assert (
        line.startswith(f"--speculative-use-{switch} draws by the rounds")
        and "--speculative-adaptive" in line
    )


def test_a_refused_draft_leaves_nothing_decided(model):
    record = ServerArgs(model_path=str(model()), speculative_algorithm="EAGLE3")
    with pytest.raises(ValueError, match="needs a draft"):
        resolve(record)
    assert declared_provenance(record) == ()


def test_the_words_of_the_algorithms_agree_with_each_other():
    assert all(facts.name == name and name.isupper() for name, facts in ALGORITHMS.items())
    assert set(ALIASES.values()) <= set(ALGORITHMS)
    assert not set(LATER) & {*ALGORITHMS, *ALIASES}
    for facts in ALGORITHMS.values():
        for shape in facts.shapes.values():
            assert 2 <= shape.num_draft_tokens <= 1 + shape.topk + (shape.num_steps - 1) * shape.topk**2
        if facts.own_settings:
            assert any(name.startswith(facts.own_settings) for name in LEAVES)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *ALIASES])
def test_what_resolves_is_served(drafting, algorithm):
    refuse_unserved(drafting(algorithm))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token_map": "ids.pt"}, r"--speculative-token-map ids.pt is not served yet; .*EAGLE3"),
        ({"draft_window_size": 512}, r"--speculative-draft-window-size 512 is not served yet; leave it out"),
        ({"draft_sink_size": 4}, r"--speculative-draft-sink-size 4 is not served yet"),
        ({"enable_multi_layer_eagle": True}, r"--enable-multi-layer-eagle is not served yet; .*EAGLE3"),
        ({"attention_mode": "decode"}, r"--speculative-attention-mode decode is not served yet; use prefill"),
        ({"draft_attention_backend": "fa3"}, r"--speculative-draft-attention-backend fa3 is not served yet"),
        ({"draft_kv_cache_dtype": "fp8_e4m3"}, r"draft-kv-cache-dtype fp8_e4m3 is not served yet; use auto"),
        ({"pp_size": 2}, r"--pp-size 2 is not served yet"),
        (
            {"dflash_block_size": 8},
            r"--speculative-dflash-block-size 8 is not served yet; .*num-draft-tokens",
        ),
    ],
)
def test_what_comes_later_is_refused_at_the_door(drafting, settings, words):
    with pytest.raises(ValueError, match=words):
        refuse_unserved(drafting("EAGLE", **settings))


def test_a_draft_has_the_attention_of_its_model(drafting, monkeypatch):
    """Another one would be accepted and have no effect."""
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    with pytest.raises(ValueError, match=r"attention-backend cpu differs from the model's torch_native"):
        drafting("EAGLE", draft_attention_backend="cpu")
    drafting("EAGLE", draft_attention_backend="torch_native")


def test_the_cache_of_a_draft_is_checked_as_that_of_its_model(drafting, monkeypatch):
    monkeypatch.setattr(compiled, "are_there", lambda: False)
    with pytest.raises(ValueError, match=r"draft-kv-cache-dtype int8 needs .* these are torch_native and"):
        drafting("EAGLE", draft_kv_cache_dtype="int8", dtype="float32")
    drafting("EAGLE", draft_kv_cache_dtype="float32", dtype="float32")


def test_external_texts_for_ngrams_are_refused_at_the_door(drafting):
    with pytest.raises(
        ValueError, match=r"--speculative-ngram-external-corpus-path x is not served yet; .*running"
    ):
        refuse_unserved(drafting("NGRAM", ngram_external_corpus_path="x"))

"""A written draft has the public format, and read back it is judged as the network that was trained."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import json

import pytest
import torch
from safetensors.torch import load_file

from train_draft.checkpoint import Draft
from train_draft.draft_tree import Tree
from train_draft.evaluation import Rounds, accepted_in_tree, judge
from train_draft.overfit import greedy_texts, overfit_tiny_draft
from train_draft.vocabulary import DraftVocabulary, choose_vocabulary


@pytest.fixture(scope="module")
def draft(tiny_folder, prompts):
    return overfit_tiny_draft(
        tiny_folder,
        prompts[:8],
        aux_layers=(0, 1, 2),
        draft_vocab_size=256,
        new_tokens=20,
        depth=3,
    )


def test_an_overfit_draft_knows_its_prompts_and_nothing_else(draft, target, prompts, texts):
    vocabulary = draft.vocabulary()
    network = draft.network(target)
    known = judge(network, vocabulary.tokens, texts[:8], vocabulary.coverage(texts[:8]))
    other = judge(network, vocabulary.tokens, texts[8:], vocabulary.coverage(texts[8:]))
    assert known.coverage == 1.0
    # 19 tokens follow the prefill's, in five rounds at least.
    assert 3.0 < known.chain_length <= 3.8
    assert known.tree_length >= known.chain_length
    assert other.chain_length < 1.3


def test_a_written_draft_has_the_public_names_shapes_and_types(draft, tmp_path):
    draft.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (320, 256)
    assert config["rope_theta"] == 10000.0
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (64, 192),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.post_attention_layernorm.weight": (64,),
        "midlayer.mlp.gate_proj.weight": (128, 64),
        "midlayer.mlp.up_proj.weight": (128, 64),
        "midlayer.mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (256, 64),
        "d2t": (256,),
        "t2d": (320,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    again = Draft.read(tmp_path)
    assert again.config == draft.config
    assert all(torch.equal(tensor, draft.tensors[name]) for name, tensor in again.tensors.items())


def test_the_maps_lead_from_draft_ids_to_target_ids_and_back():
    vocabulary = DraftVocabulary(torch.tensor([0, 2, 3, 7, 11]), 12)
    assert vocabulary.offsets().tolist() == [0, 1, 1, 4, 7]
    again = DraftVocabulary.from_maps(vocabulary.offsets(), vocabulary.mask())
    assert torch.equal(again.tokens, vocabulary.tokens)
    assert vocabulary.draft_ids()[vocabulary.tokens].tolist() == [0, 1, 2, 3, 4]
    assert vocabulary.draft_ids()[[1, 10]].tolist() == [-1, -1]


def test_maps_that_hold_ids_instead_of_offsets_are_refused():
    vocabulary = DraftVocabulary(torch.tensor([0, 2, 3, 7, 11]), 24)
    with pytest.raises(ValueError, match="d2t holds target id - draft id"):
        DraftVocabulary.from_maps(vocabulary.tokens, vocabulary.mask())


def test_frequent_tokens_come_first_then_likely_ones_and_ends_always(texts):
    counts = torch.zeros(320)
    for text in texts:
        counts += torch.bincount(text.ids[text.prompt_len :], minlength=320)
    unseen = (counts == 0).nonzero()[:, 0]
    chances = torch.zeros(320, dtype=torch.float64)
    chances[unseen[-3:]] = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    size = int((counts > 0).sum()) + 3
    chosen = choose_vocabulary(texts, chances, size=size, forced=[int(unseen[0])])
    wanted = {*(counts > 0).nonzero()[:, 0].tolist(), int(unseen[0]), int(unseen[-2]), int(unseen[-1])}
    assert set(chosen.tokens.tolist()) == wanted
    assert chosen.tokens.tolist() == sorted(wanted)
    with pytest.raises(ValueError, match="--draft-vocab-size 321"):
        choose_vocabulary(texts, chances, size=321, forced=[])


def test_a_chain_is_walked_round_by_round_to_the_end_of_the_text(texts):
    text = next(text for text in texts if text.num_new == 20)
    rounds = Rounds()
    rows = torch.ones(18, dtype=torch.bool)
    rounds.walk(text, [rows, rows[:17], rows[:16]])
    # 19 tokens follow the prefill's: four rounds of four, and one that the end cuts to three.
    assert (rounds.rounds, rounds.tokens) == (5, 19)
    none = Rounds()
    none.walk(text, [~rows, rows[:17], rows[:16]])
    assert none.mean() == 1.0


def test_a_tree_accepts_the_path_that_the_text_spells():
    tree = Tree(torch.tensor([[5, 6, 7, 8, 7]]), torch.tensor([[-1, -1, 0, 1, 1]]))
    assert accepted_in_tree(tree, 0, [6, 7, 9]) == 2
    assert accepted_in_tree(tree, 0, [6, 9, 7]) == 1
    assert accepted_in_tree(tree, 0, [7, 7]) == 0
    assert accepted_in_tree(tree, 0, [5]) == 1


def test_a_draft_whose_tensors_contradict_its_config_is_refused(draft, target):
    tensors = {**draft.tensors, "norm.weight": torch.ones(63)}
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(63,\)"):
        Draft(draft.config, tensors).network(target)


def test_texts_of_an_overfit_run_answer_all_prompts(target, prompts):
    texts = greedy_texts(target, prompts, 6)
    assert [text.ids[: text.prompt_len].tolist() for text in texts] == prompts

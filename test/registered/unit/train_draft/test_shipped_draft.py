"""The draft in `examples/` is what its card says: public format, small, judged on the committed prompts."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from train_draft.heldout import committed_hash
from train_draft.vocabulary import DraftVocabulary

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "drafts" / "smollm2-135m-eagle3"


def test_the_files_have_the_public_format_and_their_size_limit():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 25_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert (config["rope_theta"], config["vocab_size"], config["draft_vocab_size"]) == (100000.0, 49152, 8192)
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        maps = {"d2t", "t2d"}
        for name in set(file.keys()) - maps:
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()), name
        vocabulary = DraftVocabulary.from_maps(file.get_tensor("d2t"), file.get_tensor("t2d"))
        assert file.get_slice("fc.weight").get_shape() == [576, 3 * 576]
    # The tokens that end a text.
    assert vocabulary.draft_ids()[[0, 1, 2]].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind, texts, chain, tree", [("chat", 50, 1.50, 1.80), ("gsm8k", 25, 1.70, 2.00)])
def test_the_card_states_lengths_over_the_committed_prompts_that_are_good_enough(kind, texts, chain, tree):
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert committed_hash() in card
    row = re.search(rf"^\| {kind} \| (\d+) \| \d+ \| (.*?) \| (.*?) \| (.*?) \|", card, re.MULTILINE)
    assert row is not None
    assert int(row[1]) >= texts
    assert float(row[3]) >= chain and float(row[4]) >= tree
    accuracy = [float(share) for share in row[2].split("/")]
    # A recurrence that is wrong shows here: the first depth is good and the others are near zero.
    assert accuracy == sorted(accuracy, reverse=True) and accuracy[2] > 0.7 * accuracy[0]

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import pytest
import torch

from sglang.test.tiny_models import tiny_vocabulary, write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_the_same_arguments_write_the_same_bytes_and_another_seed_other_weights(tmp_path):
    """Committed seeds are only worth something if the files do not change under them."""
    first, again = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    other = write_tiny_model(tmp_path / "c", seed=1)
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
        assert (file.read_bytes() == (other / file.name).read_bytes()) is (file.suffix != ".safetensors")


@pytest.mark.parametrize("size", [259, 300, 512, 5000])
def test_a_vocabulary_has_the_size_that_is_asked_for(size):
    vocab, merges = tiny_vocabulary(size)
    assert sorted(vocab.values()) == list(range(size))
    assert all(left in vocab and right in vocab and left + right in vocab for left, right in merges)


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=258 is below 259"):
        tiny_vocabulary(258)


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not one of"):
        write_tiny_model(tmp_path, architecture="GPT2LMHeadModel")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie": True},
        {"rope_scaling": LLAMA3},
        {"architecture": "Qwen3ForCausalLM"},
        {"architecture": "Qwen3ForCausalLM", "tie": True, "seed": 3},
        {"shards": 2, "num_kv_heads": 1},
    ],
)
def test_logits_lie_so_far_apart_that_rounding_cannot_choose_the_token(tmp_path, changes):
    """Greedy text is compared over many paths; a tie would make those tests a matter of luck."""
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_model(tmp_path / "m", **changes)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = torch.arange(300)[None] * 7 % 512
    with torch.no_grad():
        logits = model(ids).logits[0]
    best = logits.topk(2).values
    assert logits.std() >= 3
    assert ((best[:, 0] - best[:, 1]) < 1e-4).sum() == 0
    assert logits.argmax(-1).unique().numel() >= 100

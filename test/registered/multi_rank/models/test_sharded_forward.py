"""The whole model over two and three ranks gives what one rank gives: logits, tokens, log-probabilities.

Head counts, vocabulary and feed-forward width are chosen so that nothing divides.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="multi-rank-cpu")

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.layers import linear
from sglang.test.multi_rank import run_ranks
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model
from sglang.test.worker_driver import WorkerDriver, driven_worker

SHAPES: dict[str, dict[str, Any]] = {
    "llama-9q-3kv": {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 45, "vocab_size": 509},
    "llama-8q-2kv-tied": {"num_heads": 8, "num_kv_heads": 2, "vocab_size": 512, "tie": True},
    "qwen3-9q-3kv-tied": {
        "architecture": "Qwen3ForCausalLM",
        "num_heads": 9,
        "num_kv_heads": 3,
        "intermediate_size": 45,
        "vocab_size": 509,
        "tie": True,
    },
    "qwen3-3q-1kv": {"architecture": "Qwen3ForCausalLM", "num_heads": 3, "num_kv_heads": 1},
    "llama-tied-with-a-head-of-its-own": {"vocab_size": 509, "tie": True},
}
PROMPTS = [list(range(30, 50)), [7, 300, 12], [5] * 9]
LIMIT = 1e-4


def three_forwards(driver: WorkerDriver) -> torch.Tensor:
    """Logits of a prompt forward, a chunked one and a decode step of three sequences, under each other."""
    first, second, third = (driver.add(ids) for ids in PROMPTS)
    parts = [driver.logits([(first, 20), (second, 3)])]
    driver.logits([(third, 4)])
    parts.append(driver.logits([(third, 5)]))
    for seq in (first, second, third):
        seq.ids.append(40)
    parts.append(driver.logits([(first, 1), (second, 1), (third, 1)], decode=True))
    return torch.cat(parts)


def differences(rank: int, models: dict[str, str], width: int, expected: str) -> dict[str, float]:
    """How far the logits of each model are from those of one rank."""
    wanted = load_file(expected)
    found: dict[str, float] = {}
    for name, path in models.items():
        with driven_worker(path, rank=rank, tp_size=width) as driver:
            logits = three_forwards(driver)
        assert logits.shape == wanted[name].shape, (name, logits.shape)
        found[name] = (logits - wanted[name]).abs().max().item()
    return found


def differences_without_a_sum(rank: int, **arguments: Any) -> dict[str, float]:
    """The planted mistake: the output projection of attention forgets to sum over the ranks."""
    before = linear.attention_tensor_parallel_all_reduce
    linear.attention_tensor_parallel_all_reduce = lambda tensor: tensor
    try:
        return differences(rank, **arguments)
    finally:
        linear.attention_tensor_parallel_all_reduce = before


def generate(rank: int, models: list[str], width: int) -> list[list[list[int]]]:
    """Greedy tokens of each model for all prompts."""
    answers = []
    for path in models:
        with driven_worker(path, rank=rank, tp_size=width) as driver:
            seqs = [driver.add(ids) for ids in PROMPTS]
            answers.append(driver.generate(seqs, 16))
    return answers


def draw_wildly(rank: int, model: str, width: int, keep_padding: bool = False) -> dict[str, list[int]]:
    """Hot tokens with listed log-probabilities; `keep_padding` plants a head that forgets to cut."""
    with driven_worker(model, rank=rank, tp_size=width) as driver:
        head = driver.worker.model_runner.model.lm_head
        if keep_padding:
            head.vocab_size = 10**6
        seqs = [driver.add(PROMPTS[0], seed=seed, temperature=2.0) for seed in range(4)]
        ask = LogprobRequest(top_num=20)
        drawn: list[int] = []
        listed: list[int] = []
        for step in range(24):
            parts = [(seq, len(seq.ids) - seq.cached) for seq in seqs]
            result = driver.step(parts, asks=[ask] * 4, decode=step > 0)
            drawn += [token for tokens in result.next_token_ids for token in tokens]
            for (entry,) in result.output_logprobs or ():
                assert entry.top is not None
                listed += [token for _, token in entry.top]
    return {"drawn": drawn, "listed": listed}


def everything_on_two_ranks(
    rank: int, models: dict[str, str], expected: str, sources: list[str], gloomy: str
) -> dict[str, Any]:
    """All that is asked of two ranks, in one start of them."""
    one = dict(list(models.items())[:1])
    return {
        "differences": differences(rank, models, 2, expected),
        "without a sum": differences_without_a_sum(rank, models=one, width=2, expected=expected),
        "tokens": generate(rank, sources, 2),
        "drawn": draw_wildly(rank, gloomy, 2),
        "drawn without a cut": draw_wildly(rank, gloomy, 2, keep_padding=True),
    }


def write_model(folder: Path, shape: dict[str, Any]) -> str:
    """A folder; one that is called so says tied and brings a head that is not the embedding."""
    write_tiny_model(folder, **shape)
    if folder.name.endswith("with-a-head-of-its-own"):
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


def write_gloomy_model(folder: Path) -> str:
    """All ids have logits far below zero, so that a padded one, whose logit is zero, would always win."""
    write_tiny_model(folder, vocab_size=509)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] += 20.0
    weights["lm_head.weight"] -= 0.6
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
    """Folder and F16 GGUF file of a Llama, then of a Qwen3."""
    found = []
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        folder = tmp_path_factory.mktemp("sources") / name
        write_tiny_model(folder, architecture=name, num_heads=9, num_kv_heads=3, dtype="float16")
        found += [str(folder), str(write_tiny_gguf(folder, quantization="F16"))]
    return found


@pytest.fixture(scope="module")
def gloomy(tmp_path_factory) -> str:
    return write_gloomy_model(tmp_path_factory.mktemp("gloomy") / "model")


@pytest.fixture(scope="module")
def expected(models: dict[str, str], tmp_path_factory) -> str:
    """The logits of one rank, in a file."""
    logits = {}
    for name, path in models.items():
        with driven_worker(path) as driver:
            logits[name] = three_forwards(driver)
    file = tmp_path_factory.mktemp("expected") / "logits.safetensors"
    save_file(logits, file)
    return str(file)


@pytest.fixture(scope="module")
def two_ranks(models, expected, sources, gloomy) -> list[dict[str, Any]]:
    return run_ranks(
        everything_on_two_ranks,
        world_size=2,
        models=models,
        expected=expected,
        sources=sources,
        gloomy=gloomy,
    )


def test_the_logits_of_two_ranks_are_those_of_one(two_ranks):
    for answer in two_ranks:
        assert set(answer["differences"]) == set(SHAPES)
        assert max(answer["differences"].values()) < LIMIT, answer


def test_the_logits_of_three_ranks_are_those_of_one(models, expected):
    """8 query and 2 key/value heads leave the third rank with padding only; 3 and 1 copy the one head."""
    for found in run_ranks(differences, world_size=3, models=models, width=3, expected=expected):
        assert set(found) == set(SHAPES)
        assert max(found.values()) < LIMIT, found


def test_a_sum_that_is_left_out_is_seen(two_ranks):
    assert all(min(answer["without a sum"].values()) > 100 * LIMIT for answer in two_ranks), two_ranks


def test_a_gguf_file_and_a_folder_of_one_model_give_equal_tokens_on_one_and_on_two_ranks(two_ranks, sources):
    alone = generate(0, sources, 1)
    assert alone[0] == alone[1] and alone[2] == alone[3]
    assert alone[0] != alone[2]
    assert [answer["tokens"] for answer in two_ranks] == [alone, alone]


def test_no_id_outside_the_vocabulary_is_drawn_or_listed(two_ranks, gloomy):
    for answer in two_ranks:
        found = answer["drawn"]
        assert len(found["drawn"]) == 4 * 24 and len(found["listed"]) == 4 * 24 * 20
        assert max(found["drawn"] + found["listed"]) < 509
        assert len(set(found["drawn"])) > 20, "temperature 2 has to spread"
        assert found == draw_wildly(0, gloomy, 1)


def test_a_head_that_is_not_cut_is_seen(two_ranks):
    found = two_ranks[0]["drawn without a cut"]
    assert max(found["drawn"]) == max(found["listed"]) == 509

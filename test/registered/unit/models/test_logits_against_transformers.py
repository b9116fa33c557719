from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="unit-cpu")

import pytest
import torch

from sglang.test.spoiled_slots import spoil
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": {},
    "llama tied, 3 kv heads": {
        "tie": True,
        "hidden_size": 72,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 8,
    },
    "llama with llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "qwen3 tied, one kv head": {"architecture": "Qwen3ForCausalLM", "tie": True, "num_kv_heads": 1},
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=7, **KINDS[request.param])


@pytest.fixture(scope="module")
def theirs(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(ids):
        return model(torch.tensor([ids])).logits[0]

    return logits


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def driver(folder, request):
    with driven_worker(folder, page_size=request.param) as driver:
        yield driver


def prompt(length, seed):
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE


def test_a_prompt_gives_the_logits_of_the_reference(driver, theirs):
    ids = prompt(37, 1)
    assert theirs(ids).std() > 3  # else a wrong model would be close as well
    assert_close(driver.logits([(driver.add(ids), 37)])[0], theirs(ids)[-1])


def test_decoding_over_the_cache_equals_running_the_whole_sequence(driver, theirs):
    ids = prompt(40, 2)
    expected = theirs(ids)
    seq = driver.add(ids)
    driver.logits([(seq, 20)])
    for _ in range(20, 40):
        logits = driver.logits([(seq, 1)], decode=True)
    assert seq.cached == 40
    assert_close(logits[0], expected[-1])


def test_a_prompt_in_chunks_gives_the_same_logits(driver, theirs):
    """Every chunk but the first attends to a prefix in the cache, with a causal edge inside the chunk."""
    ids = prompt(50, 3)
    seq = driver.add(ids)
    for count in (1, 17, 16, 2, 14):
        logits = driver.logits([(seq, count)])
    assert_close(logits[0], theirs(ids)[-1])


def test_prompts_of_different_lengths_do_not_disturb_each_other(driver, theirs):
    prompts = [prompt(length, 10 + length) for length in (5, 64, 1, 33)]
    logits = driver.logits([(driver.add(ids), len(ids)) for ids in prompts])
    assert_close(logits, torch.stack([theirs(ids)[-1] for ids in prompts]))


def test_decode_rows_ride_along_with_prompts(driver, theirs):
    """A mixed batch: rows of length one in an extend batch, between chunks with and without a prefix, and a
    chunk that is not the last of its prompt (nothing is drawn there)."""
    running, fresh, chunked, unfinished = (prompt(n, 20 + n) for n in (30, 12, 26, 40))
    a, b, c, d = (driver.add(ids) for ids in (running, fresh, chunked, unfinished))
    driver.logits([(a, 29), (c, 9)])
    logits = driver.logits([(b, 12), (a, 1), (d, 13), (c, 17)])
    assert_close(logits, torch.stack([theirs(ids)[-1] for ids in (fresh, running, chunked)]))
    assert_close(driver.logits([(d, 27)])[0], theirs(unfinished)[-1])


def test_a_decode_batch_of_very_different_lengths_is_right_for_each_row(driver, theirs):
    """Long and short rows are padded apart from each other; each result must come back to its own row."""
    prompts = [prompt(length, 40 + length) for length in (300, 3, 290, 20, 140)]
    seqs = [driver.add(ids) for ids in prompts]
    driver.logits([(seq, len(seq.ids) - 1) for seq in seqs])
    logits = driver.logits([(seq, 1) for seq in seqs], decode=True)
    assert_close(logits, torch.stack([theirs(ids)[-1] for ids in prompts]))


def test_slots_used_before_do_not_shine_through(driver, theirs):
    """What an earlier request left in the pool, be it NaN, is never read. Padding would read it: the short
    request has the row of the table that the earlier one had."""
    long, short = prompt(60, 6), prompt(4, 7)
    first, a = driver.add(prompt(100, 5)), driver.add(long)
    driver.logits([(first, 100), (a, 59)])
    for layer in range(2):
        spoil(driver.worker.pools.kv, layer, torch.as_tensor(first.slots))
    driver.drop(first)
    b = driver.add(short)
    assert b.req_pool_idx == first.req_pool_idx
    driver.logits([(b, 3)])
    logits = driver.logits([(b, 1), (a, 1)], decode=True)
    assert_close(logits, torch.stack([theirs(short)[-1], theirs(long)[-1]]))

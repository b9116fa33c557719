from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import pytest
import torch

from sglang.srt.batch.forward_batch import NOT_FINITE, ForwardBatch, ForwardMode
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.test.spoiled_slots import spoil
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model
from sglang.test.worker_driver import driven_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def driver(folder):
    with driven_worker(folder) as driver:
        yield driver


def prompt(length, seed):
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_worker_says_what_the_scheduler_must_know(folder):
    with driven_worker(folder, page_size=16, max_total_tokens=100, max_running_requests=5) as driver:
        worker = driver.worker
        assert (worker.page_size, worker.max_total_num_tokens) == (16, 96)
        assert (worker.vocab_size, worker.context_len) == (512, 512)
        assert worker.token_to_kv_pool_allocator.size == 96
        assert worker.req_to_token_pool.req_to_token.shape == (5 + 1, 512)  # and the spare row
        assert worker.model_config.eos_token_ids


def test_greedy_text_is_the_same_alone_together_and_in_chunks(driver):
    prompts = [prompt(n, n) for n in (3, 40, 17, 90)]
    alone = [driver.generate([driver.add(ids)], 12)[0] for ids in prompts]
    assert driver.generate([driver.add(ids) for ids in prompts], 12) == alone
    chunked = driver.add(prompts[3])
    for count in (31, 1, 40):
        assert driver.step([(chunked, count)]).next_token_ids == [[]]
    assert driver.generate([chunked], 12)[0] == alone[3]


def test_a_seeded_answer_does_not_depend_on_company(driver):
    ids, params = prompt(20, 1), {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    alone = driver.generate([driver.add(ids, **params)], 16)[0]
    company = [driver.add(prompt(n, n), temperature=2.0, seed=n) for n in (5, 30, 11)]
    subject = driver.add(ids, **params)
    assert driver.generate([*company[:2], subject, company[2]], 16)[2] == alone


def test_bf16_and_fp16_models_run_and_cache_in_their_type(folder):
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        with driven_worker(folder, dtype=name) as driver:
            assert driver.worker.pools.kv.layer(0).dtype == dtype
            prompts = [prompt(30, 2), prompt(9, 3)]
            together = driver.generate([driver.add(ids) for ids in prompts], 8)
            assert all(len(tokens) == 8 for tokens in together)


def reference_logprobs(driver, ids):
    """Raw log-softmax after each prefix, one forward a prefix."""
    rows = [driver.logits([(driver.add(ids[: i + 1]), i + 1)])[0] for i in range(len(ids))]
    return torch.log_softmax(torch.stack(rows), dim=-1)


def test_prompt_logprobs_are_those_of_each_prefix_whatever_the_chunks(driver):
    """From the third token on, chunked with a target beyond the chunk's edge, beside a request that asks for
    nothing, and with pieces of two rows.
    """
    ids = prompt(12, 4)
    expected = reference_logprobs(driver, ids)
    driver.worker.model_runner.model.logits_processor = LogitsProcessor(512, piece_bytes=2 * 4 * 512)
    seq, other = driver.add(ids), driver.add(prompt(6, 5))
    first = LogprobRequest(top_num=3, token_ids=[7, 9], first_row=2, targets=ids[3:8])
    second = LogprobRequest(top_num=3, token_ids=[7, 9], first_row=0, targets=ids[8:12])
    a = driver.step([(other, 6), (seq, 7)], asks=[None, first])
    b = driver.step([(seq, 5), (other, 1)], asks=[second, None])
    assert a.input_logprobs[0] is None and a.output_logprobs == [[], []]
    assert b.output_logprobs[1] == [] and len(b.output_logprobs[0]) == 1
    entries = a.input_logprobs[1] + b.input_logprobs[0]
    assert [entry.token_id for entry in entries] == ids[3:]
    for row, entry in enumerate(entries, start=2):
        assert entry.logprob == pytest.approx(float(expected[row, ids[row + 1]]), abs=1e-4)
        best = torch.topk(expected[row], 3)
        assert [i for _, i in entry.top] == best.indices.tolist()
        assert [v for v, _ in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [i for _, i in entry.chosen] == [7, 9]


def test_a_target_without_a_row_is_our_own_mistake_and_is_said(driver):
    ask = LogprobRequest(first_row=2, targets=[1, 2, 3])
    with pytest.raises(RuntimeError, match="3 prompt tokens from row 2"):
        driver.step([(driver.add(prompt(4, 6)), 4)], asks=[ask])


def test_a_poisoned_request_fails_alone_and_its_neighbours_answer_as_before(driver):
    """NaN in one request's cached keys reaches its own logits only, in drawing and in prompt logprobs."""
    prompts = [prompt(n, 50 + n) for n in (8, 20, 13)]
    healthy = driver.generate([driver.add(ids) for ids in prompts], 5)
    seqs = [driver.add(ids) for ids in prompts]
    driver.step([(seq, len(seq.ids)) for seq in seqs])
    spoil(driver.worker.pools.kv, 0, torch.tensor([int(seqs[1].slots[3])]))
    for _ in range(4):
        result = driver.step([(seq, 1) for seq in seqs], decode=True)
        assert result.failures == [None, NOT_FINITE, None]
        assert result.next_token_ids[1] == []
        seqs[1].ids.append(1)  # the scheduler would end it here; going on must do no harm
    for b in (0, 2):
        assert seqs[b].ids[len(prompts[b]) :] == healthy[b]
    ask = LogprobRequest(targets=[5, 6, 7])
    seqs[1].ids += [2, 3]
    result = driver.step([(seqs[1], 3), (seqs[0], 1)], asks=[ask, None])
    assert result.failures == [NOT_FINITE, None]
    assert result.input_logprobs[0] is None


def test_drawn_tokens_are_in_the_result_once_it_is_read(driver):
    """The scheduler decides how late it waits for the device."""
    ids = prompt(6, 3)
    seq = driver.add(ids)
    expected = driver.generate([driver.add(ids)], 1)
    result = driver.worker.forward_batch_generation(driver.batch([(seq, len(ids))]))
    assert result.next_token_ids == [[]] and result.drawn is not None
    result.read()
    assert result.next_token_ids == expected and result.drawn is None
    result.read()
    assert result.next_token_ids == expected


def test_an_idle_batch_gives_an_empty_result(driver):
    empty = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(ForwardMode.IDLE, empty, empty, empty, empty, empty, [], [], [])
    result = driver.worker.forward_batch_generation(batch)
    assert (result.next_token_ids, result.failures) == ([], [])


def test_a_gguf_file_gives_the_same_tokens_as_its_folder(folder, tmp_path, driver):
    ids = prompt(15, 9)
    expected = driver.generate([driver.add(ids)], 10)
    with driven_worker(write_tiny_gguf(folder, tmp_path / "tiny.gguf")) as other:
        assert other.generate([other.add(ids)], 10) == expected


def test_a_back_end_that_is_not_served_is_refused(folder):
    with (
        pytest.raises(ValueError, match="attention_backend: 'triton' is not served"),
        driven_worker(folder, attention_backend="triton"),
    ):
        pass


def test_an_unresolved_dtype_says_what_to_do(folder):
    with pytest.raises(RuntimeError, match="dtype is 'auto'"), driven_worker(folder, dtype="auto"):
        pass


def test_logprobs_of_a_draw_go_to_the_request_that_drew(driver):
    """An unfinished chunk before it draws nothing, so places among drawn rows and in the batch differ."""
    unfinished, seq = driver.add(prompt(6, 7)), driver.add(prompt(5, 8))
    result = driver.step(
        [(unfinished, 2), (seq, 5)], asks=[LogprobRequest(top_num=4), LogprobRequest(top_num=2)]
    )
    assert result.next_token_ids[0] == result.output_logprobs[0] == []
    (entry,), (token,) = result.output_logprobs[1], result.next_token_ids[1]
    assert len(entry.top) == 2 and entry.top[0] == (entry.logprob, token)

"""A head may have more rows than there are tokens: the rest is not scored."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_model, write_tiny_tokenizer
from sglang.test.worker_driver import WorkerDriver, driven_worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=512)


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[WorkerDriver]:
    with driven_worker(model) as driver:
        yield driver


def scores(worker: TpModelWorker) -> torch.Tensor:
    driver = WorkerDriver(worker)
    return driver.logits([(driver.add([5, 6, 7]), 3)])


def limited(whole: WorkerDriver, model: Path, num_ids: int | None) -> TpModelWorker:
    return TpModelWorker(ModelConfig.from_path(str(model)), num_ids=num_ids)


def test_rows_beyond_the_known_ids_are_not_scored(whole: WorkerDriver, model: Path) -> None:
    worker = limited(whole, model, 500)
    assert worker.vocab_size == 500
    assert torch.equal(scores(worker), scores(whole.worker)[:, :500])


@pytest.mark.parametrize("num_ids", [None, 512, 600])
def test_without_a_tokenizer_or_with_one_that_knows_more_all_rows_count(
    whole: WorkerDriver, model: Path, num_ids: int | None
) -> None:
    worker = limited(whole, model, num_ids)
    assert worker.vocab_size == 512
    assert scores(worker).shape == (1, 512)


def test_a_prompt_token_is_normalised_over_the_known_ids_only(whole: WorkerDriver, model: Path) -> None:
    first = whole.logits([(whole.add([5]), 1)])[0]
    driver = WorkerDriver(limited(whole, model, 500))
    ask = LogprobRequest(first_row=0, targets=[6])
    result = driver.step([(driver.add([5, 6]), 2)], asks=[ask])
    assert result.input_logprobs is not None and result.input_logprobs[0] is not None
    expected = torch.log_softmax(first[:500], dim=-1)[6].item()
    assert result.input_logprobs[0][0].logprob == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(torch.log_softmax(first, dim=-1)[6].item(), abs=1e-5)


def test_a_tokenizer_says_up_to_which_id_it_knows_tokens(model: Path) -> None:
    write_tiny_tokenizer(model, vocab_size=400)
    tokenizer = load_tokenizer(model)
    assert tokenizer.num_ids == 400
    assert tokenizer.token_bytes(399) is not None

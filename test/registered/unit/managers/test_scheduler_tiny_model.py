"""The scheduler over a tiny random model in fp32: the same text and log-probabilities on every path."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.fake_channel import Answer, FakeChannel
from sglang.test.fakes.scheduler_driver import make_request, run
from sglang.test.tiny_models import write_tiny_model

BASE = [(13 * i) % 400 + 5 for i in range(60)]
PROMPTS = [*([*BASE[:n], 10 + n, 7, 8] for n in (3, 20, 40, 59)), [9], BASE, BASE[::-1]]
LENGTH = 16
Make = Callable[..., Scheduler]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(model_folder: pathlib.Path) -> Iterator[Make]:
    """A scheduler over the tiny model with these fields; one at a time, all groups of one rank."""

    def build(**fields: Any) -> Scheduler:
        tear_down()
        record = ServerArgs(model_path=str(model_folder), dtype="float32", **fields)
        resolve(record)
        publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None))
        parallel_state.init_distributed_environment()
        parallel_state.initialize_model_parallel()
        worker = TpModelWorker(ModelConfig.from_path(model_folder))
        torch.set_num_threads(1)  # a tiny model gains nothing from threads, and test machines are busy
        return Scheduler(worker, tokenizer=None, channel=FakeChannel())

    def tear_down() -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()

    yield build
    tear_down()


def answer_all(scheduler: Scheduler, turn: int = 0) -> list[Answer]:
    """All prompts at once; every second one asks for its prompt logprobs too."""
    requests = [
        make_request(
            f"t{turn}-{i}-",
            prompt,
            LENGTH,
            ignore_eos=True,
            return_logprob=True,
            logprob_start_len=0 if i % 2 else -1,
            top_logprobs_num=2,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = run(scheduler, *requests)
    return [answers[request.rid] for request in requests]


def values(answer: Answer) -> list[float]:
    entries = [*(answer.input_logprobs or [])[1:], *answer.output_logprobs]
    return [entry.logprob for entry in entries if entry.logprob is not None]


def test_text_and_logprobs_do_not_depend_on_the_path(make: Make) -> None:
    """Cached or not, in chunks, in pages, alone, pushed back: the same within fp32 rounding."""
    truth = answer_all(make(disable_radix_cache=True, max_running_requests=1))
    for fields in (
        {},
        {"page_size": 16},
        {"page_size": 16, "chunked_prefill_size": 16},
        {"page_size": 4, "max_total_tokens": 136, "schedule_conservativeness": 0.0},
    ):
        scheduler = make(**fields)
        for turn in range(2):  # the second turn meets a filled cache
            got = answer_all(scheduler, turn)
            assert [a.ids for a in got] == [a.ids for a in truth], (fields, turn)
            for mine, alone in zip(got, truth):
                assert len(mine.output_logprobs) == LENGTH and len(values(mine)) == len(values(alone))
                assert values(mine) == pytest.approx(values(alone), abs=1e-3), (fields, turn)
        assert scheduler.kv.used() == 0
        assert (scheduler.load.num_retractions > 0) == ("max_total_tokens" in fields)


def test_the_first_prompt_entry_is_none_and_the_chosen_token_is_among_the_best(make: Make) -> None:
    answer = answer_all(make())[1]
    assert answer.input_logprobs is not None and len(answer.input_logprobs) == len(PROMPTS[1])
    assert answer.input_logprobs[0].logprob is None
    for entry in answer.output_logprobs:  # greedy: the token drawn is the best one
        assert entry.top is not None and entry.top[0] == (entry.logprob, entry.token_id)


@pytest.mark.parametrize(("chunk", "new_tokens"), [(16, 4), (-1, 0)], ids=["cut prompt", "prompt alone"])
def test_a_prompt_that_is_not_finite_leaves_nothing_of_it_to_others(
    make: Make, monkeypatch: pytest.MonkeyPatch, chunk: int, new_tokens: int
) -> None:
    """No token is drawn from such a part, so its logits are not seen.

    Through the sum over masked tokens its NaN reach the rows before the bad token, which another request
    shares.
    """
    scheduler = make(chunked_prefill_size=chunk)
    healthy = make_request("healthy", [*BASE[:25], 7, 8], 4, ignore_eos=True)
    expected = run(scheduler, healthy)["healthy"].ids
    scheduler.kv.flush()
    bad_token = 450
    assert isinstance(scheduler.worker, TpModelWorker)
    embedding = scheduler.worker.model_runner.model.model.embed_tokens
    look_up = embedding.forward

    def look_up_nan(ids: torch.Tensor) -> torch.Tensor:
        return look_up(ids).masked_fill((ids == bad_token)[:, None], float("nan"))

    monkeypatch.setattr(embedding, "forward", look_up_nan)
    failed = run(scheduler, make_request("bad", [*BASE[:25], bad_token, *BASE[26:]], new_tokens))["bad"]
    assert failed.finish_reason is not None and failed.finish_reason.status_code == 500
    again = run(scheduler, make_request("again", [*BASE[:25], 7, 8], 4, ignore_eos=True))["again"]
    assert again.ids == expected

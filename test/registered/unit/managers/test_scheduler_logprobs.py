"""Log-probabilities: one per token, after the true prefix, whatever the cache, the chunks and the batch."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections.abc import Callable

import pytest

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import AbortReq
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.fake_worker import expected_logprobs, expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPT = [(7 * i) % 900 for i in range(50)]
ASK = LogprobRequest(top_num=3, token_ids=[9, 4])


def wanting(rid: str, start: int, max_new_tokens: int = 6, prompt: list[int] = PROMPT):
    return make_request(
        rid,
        prompt,
        max_new_tokens,
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=3,
        token_ids_logprob=[9, 4],
    )


def assert_right(answer: Answer, start: int, prompt: list[int] = PROMPT) -> None:
    """The first prompt entry has no value, every other one is that of its token after its true prefix."""
    assert answer.input_logprobs is not None and len(answer.input_logprobs) == len(prompt) - start
    first = answer.input_logprobs[0]
    assert (first.logprob, first.token_id, first.top) == (None, prompt[start], None)
    assert answer.input_logprobs[1:] == expected_logprobs(prompt, start + 1, ASK)
    assert answer.output_logprobs == expected_logprobs([*prompt, *answer.ids], len(prompt), ASK)


@pytest.mark.parametrize("chunk", [-1, 7, 16, 49, 50])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("start", [0, 20, 48, 49])
def test_prompt_logprobs_do_not_depend_on_cache_or_chunks(
    new_scheduler: New, chunk: int, page_size: int, start: int
) -> None:
    scheduler = new_scheduler(chunked_prefill_size=chunk, page_size=page_size)
    cold = run(scheduler, wanting("cold", start))["cold"]
    warm = run(scheduler, wanting("warm", start))["warm"]
    assert_right(cold, start)
    assert_right(warm, start)
    assert cold.cached_tokens == 0 and start - page_size < warm.cached_tokens <= start
    assert cold.ids == warm.ids == expected_output(PROMPT, 6)


def test_neighbours_without_logprobs_share_the_batch(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    others = [make_request(f"o{i}", [i, *PROMPT], 6) for i in range(3)]
    got = run(
        scheduler, others[0], wanting("a", 0), others[1], wanting("b", 30, prompt=PROMPT[::-1]), others[2]
    )
    assert_right(got["a"], 0)
    assert_right(got["b"], 30, PROMPT[::-1])
    assert got["o1"].input_logprobs is None and got["o1"].output_logprobs == []


def test_output_logprobs_alone_cost_no_prefix_reuse(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    run(scheduler, make_request("fill", PROMPT, 2))
    answer = run(scheduler, wanting("r", -1))["r"]
    assert answer.input_logprobs is None and len(answer.output_logprobs) == 6
    assert answer.cached_tokens == 49


def test_scoring_without_new_tokens_gives_the_prompt_logprobs(new_scheduler: New) -> None:
    """The usual evaluation call: echo the prompt, draw nothing."""
    scheduler = new_scheduler(chunked_prefill_size=16)
    answer = run(scheduler, wanting("r", 0, max_new_tokens=0))["r"]
    assert answer.ids == [] and answer.output_logprobs == []
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"
    assert answer.finish_reason.length == 0
    assert answer.input_logprobs is not None and answer.input_logprobs[0].logprob is None
    assert answer.input_logprobs[1:] == expected_logprobs(PROMPT, 1, ASK)


def test_a_prompt_of_one_token_has_one_entry_without_a_value(new_scheduler: New) -> None:
    answer = run(new_scheduler(), wanting("r", 0, prompt=[7]))["r"]
    assert_right(answer, 0, [7])


def test_prompt_logprobs_come_with_the_first_output_and_only_once(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    message = wanting("r", 0)
    message.stream = True
    run(scheduler, message)
    news = [output for sent in scheduler.channel.sent for output in sent.outputs]
    assert [output.input_logprobs is not None for output in news] == [True] + 5 * [False]


def test_an_abort_in_the_middle_of_the_prompt_still_answers(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=16)
    scheduler.channel.inbox.append(wanting("r", 0))
    scheduler.step()
    answer = run(scheduler, AbortReq(rid="r"))["r"]
    assert answer.input_logprobs is not None and answer.output_logprobs == []
    assert run(scheduler, wanting("again", 0))["again"].finish_reason is not None


def test_followers_that_want_prompt_logprobs_do_not_wait_for_a_prefix_they_may_not_reuse(
    new_scheduler: New,
) -> None:
    scheduler = new_scheduler()
    got = run(scheduler, *(wanting(f"r{i}", 0) for i in range(4)))
    assert scheduler.worker.forwards["extend"] == 1
    for answer in got.values():
        assert_right(answer, 0)

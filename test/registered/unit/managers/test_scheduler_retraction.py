"""A full pool: requests are retracted and go on later without a gap, none starves, the last ends early."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import logging
from collections.abc import Callable

import pytest

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.fakes.fake_channel import answers
from sglang.test.fakes.fake_worker import expected_logprobs, expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPTS = [[(start + 7 * i) % 900 for i in range(30)] for start in range(0, 400, 50)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cached", [True, False])
def test_retracted_requests_go_on_without_a_gap(new_scheduler: New, page_size: int, cached: bool) -> None:
    scheduler = new_scheduler(
        pool_tokens=320, page_size=page_size, schedule_conservativeness=0.0, disable_radix_cache=not cached
    )
    requests = [
        make_request(
            f"r{i}", p, 60, stream=True, return_logprob=True, logprob_start_len=5, top_logprobs_num=2
        )
        for i, p in enumerate(PROMPTS)
    ]
    got = run(scheduler, *requests)
    ask = LogprobRequest(top_num=2)
    for i, prompt in enumerate(PROMPTS):
        answer = got[f"r{i}"]
        assert answer.ids == expected_output(prompt, 60)
        assert answer.events == [[token] for token in answer.ids], "a stream event is missing or comes twice"
        assert answer.output_logprobs == expected_logprobs([*prompt, *answer.ids], 30, ask)
        assert answer.input_logprobs is not None and len(answer.input_logprobs) == 25
        assert answer.cached_tokens == 0, "its own tokens, found again after a retraction, are no cache hit"
    assert sum(answer.num_retractions for answer in got.values()) > 0
    assert scheduler.load.num_retractions == sum(answer.num_retractions for answer in got.values())
    assert scheduler.kv.used() == 0


def test_the_request_with_the_fewest_output_tokens_is_pushed_back_first(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=140, schedule_conservativeness=0.0)
    scheduler.channel.inbox.append(make_request("old", PROMPTS[0], 60))
    for _ in range(20):
        scheduler.step()
    got = run(scheduler, make_request("young", PROMPTS[1], 70))
    assert got["old"].num_retractions == 0 and got["young"].num_retractions > 0
    assert got["young"].ids == expected_output(PROMPTS[1], 70)


def test_a_retracted_request_goes_before_those_that_never_started(new_scheduler: New) -> None:
    """Newcomers that would fit must not overtake it for ever."""
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0)
    scheduler.channel.inbox.extend(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS[:2]))
    done_at = None
    for step in range(400):
        scheduler.channel.inbox.append(make_request(f"small{step}", [step % 900, 1, 2], 4))
        scheduler.step()
        got = answers(scheduler.channel)
        if done_at is None and all(f"r{i}" in got and got[f"r{i}"].finish_reason for i in range(2)):
            done_at = step
    assert done_at is not None and done_at < 200
    assert sum(got[f"r{i}"].num_retractions for i in range(2)) > 0
    assert [got[f"r{i}"].ids for i in range(2)] == [expected_output(p, 60) for p in PROMPTS[:2]]


def test_a_retracted_request_finds_what_is_left_of_its_tokens_in_the_cache(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0)
    got = run(scheduler, *(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS[:2])))
    assert sum(a.num_retractions for a in got.values()) > 0
    # Without reuse a resumed request would compute its 30 prompt tokens and its output again.
    assert scheduler.worker.rows["extend"] < 60 + 30 * sum(a.num_retractions for a in got.values())


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_that_fills_the_pool_alone_ends_with_length(
    new_scheduler: New, page_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Pool 256, prompt 200, 200 new tokens: it runs until the pool is full, and the next one is served."""
    scheduler = new_scheduler(pool_tokens=256, page_size=page_size)
    prompt = [(7 * i) % 900 for i in range(200)]
    got = run(scheduler, make_request("big", prompt, 200), make_request("small", [1, 2, 3], 4))
    assert got["big"].finish_reason is not None and got["big"].finish_reason.type == "length"
    # 256 tokens in the cache, and the token drawn from the last of them.
    assert got["big"].ids == expected_output(prompt, 57)
    assert got["big"].finish_reason.length == 57
    assert "256" in (got["big"].finish_reason.message or "") and "--max-total-tokens" in caplog.text
    assert got["small"].ids == expected_output([1, 2, 3], 4)
    assert scheduler.kv.used() == 0


def test_a_long_prompt_in_chunks_beside_a_dry_pool_keeps_its_logprobs(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=160, chunked_prefill_size=16, schedule_conservativeness=0.0)
    prompts = [*PROMPTS[:2], [(3 * i) % 900 for i in range(95)]]
    fields = {"return_logprob": True, "logprob_start_len": 0}
    got = run(scheduler, *(make_request(f"r{i}", p, 40, **fields) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert got[f"r{i}"].ids == expected_output(prompt, 40)
        entries = got[f"r{i}"].input_logprobs
        assert entries is not None and entries[0].logprob is None
        assert entries[1:] == expected_logprobs(prompt, 1, LogprobRequest())
    assert sum(a.num_retractions for a in got.values()) > 0


def test_a_retracted_request_stands_at_the_head_of_the_queue(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0, max_running_requests=2)
    scheduler.channel.inbox.extend(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS[:6]))
    while not scheduler.load.num_retractions:
        scheduler.step()
    assert [req.num_retractions for req in scheduler.queues.waiting] == [1, 0, 0, 0, 0]


def test_penalties_and_seed_position_survive_a_retraction(new_scheduler: New) -> None:
    """What the sampler counts belongs to the request: nothing is reset and no token is counted twice."""
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0)
    scheduler.channel.inbox.extend(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS[:2]))
    scheduler.step()
    states = {req.rid: req.sampling for req in (*scheduler.queues.started(), *scheduler.queues.waiting)}
    got = run(scheduler)
    assert sum(a.num_retractions for a in got.values()) > 0
    for i in range(2):
        ids = got[f"r{i}"].ids
        assert states[f"r{i}"].num_output == 60
        assert states[f"r{i}"].counts == {token: ids.count(token) for token in ids}


def test_a_retraction_is_logged_with_its_count(new_scheduler: New, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler = new_scheduler(pool_tokens=128, schedule_conservativeness=0.0)
    run(scheduler, *(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS[:2])))
    assert "KV cache pool is full. Retract requests. #retracted_reqs: 1" in caplog.text


def test_a_cautious_estimate_avoids_retractions(new_scheduler: New) -> None:
    """With the whole allowed output reserved at admission, nobody has to be pushed back."""
    scheduler = new_scheduler(pool_tokens=320, schedule_conservativeness=10.0)
    got = run(scheduler, *(make_request(f"r{i}", p, 60) for i, p in enumerate(PROMPTS)))
    assert scheduler.load.num_retractions == 0
    assert max(scheduler.worker.batch_sizes) == 3
    assert all(got[f"r{i}"].ids == expected_output(p, 60) for i, p in enumerate(PROMPTS))

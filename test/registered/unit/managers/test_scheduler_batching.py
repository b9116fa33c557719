"""Work is done once and together: forwards and rows are counted, so no prefix is computed twice."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

from collections.abc import Callable

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
DISTINCT = [list(range(start, start + 40)) for start in range(0, 400, 50)]


def test_eight_requests_of_32_tokens_are_about_32_decode_forwards(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    answers = run(scheduler, *(make_request(f"r{i}", p, 32) for i, p in enumerate(DISTINCT)))
    assert [answers[f"r{i}"].ids for i in range(8)] == [expected_output(p, 32) for p in DISTINCT]
    assert scheduler.worker.forwards == {"extend": 1, "decode": 31}
    assert scheduler.worker.rows == {"extend": 320, "decode": 8 * 31}


def test_requests_that_come_later_join_the_running_batch(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(make_request("first", DISTINCT[0], 32))
    for _ in range(10):
        scheduler.step()
    answers = run(scheduler, *(make_request(f"r{i}", p, 16) for i, p in enumerate(DISTINCT[1:])))
    assert answers["first"].ids == expected_output(DISTINCT[0], 32)
    assert answers["r6"].ids == expected_output(DISTINCT[7], 16)
    assert scheduler.worker.forwards == {"extend": 2, "decode": 31}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 160, 163])
def test_a_chunk_size_of_16_needs_a_sixteenth_of_the_prompt_in_forwards(
    new_scheduler: New, page_size: int, length: int
) -> None:
    scheduler = new_scheduler(chunked_prefill_size=16, page_size=page_size)
    prompt = [(7 * i) % 900 for i in range(length)]
    answers = run(scheduler, make_request("r", prompt, 4))
    assert answers["r"].ids == expected_output(prompt, 4)
    assert scheduler.worker.forwards["extend"] == -(-length // 16)
    assert scheduler.worker.rows["extend"] == length


def test_a_chunk_smaller_than_a_page_still_computes_each_token_once(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=5, page_size=16)
    answers = run(scheduler, make_request("r", DISTINCT[0], 20))
    assert answers["r"].ids == expected_output(DISTINCT[0], 20)
    assert scheduler.worker.forwards["extend"] == 8 and scheduler.worker.rows["extend"] == 40


def test_without_chunks_a_prompt_above_the_budget_is_one_forward_of_its_own(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=-1, max_prefill_tokens=64)
    long = [(3 * i + 500) % 900 for i in range(200)]
    run(
        scheduler,
        make_request("long", long, 2),
        *(make_request(f"r{i}", p, 2) for i, p in enumerate(DISTINCT)),
    )
    assert scheduler.worker.batch_sizes[0] == 1
    assert scheduler.worker.rows["extend"] == 520
    # 40 new tokens each under a budget of 64: one prompt a forward.
    assert scheduler.worker.forwards["extend"] == 9


def test_the_rest_of_a_chunk_is_given_to_the_next_prompts(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=100)
    run(scheduler, *(make_request(f"r{i}", p, 2) for i, p in enumerate(DISTINCT)))
    assert scheduler.worker.forwards["extend"] == 4  # 320 tokens in chunks of 100
    assert scheduler.worker.rows["extend"] == 320


def test_running_requests_and_requests_per_prefill_are_bounded(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=3)
    run(scheduler, *(make_request(f"r{i}", p, 8) for i, p in enumerate(DISTINCT)))
    assert max(scheduler.worker.batch_sizes) == 3
    scheduler = new_scheduler(prefill_max_requests=2)
    run(scheduler, *(make_request(f"r{i}", p, 8) for i, p in enumerate(DISTINCT)))
    assert scheduler.worker.batch_sizes[:4] == [2, 2, 2, 2]


def test_the_request_table_bounds_the_running_requests_too(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_requests=2)
    answers = run(scheduler, *(make_request(f"r{i}", p, 8) for i, p in enumerate(DISTINCT)))
    assert max(scheduler.worker.batch_sizes) == 2
    assert all(answers[f"r{i}"].ids == expected_output(p, 8) for i, p in enumerate(DISTINCT))


@pytest.mark.parametrize(("page_size", "computed_once"), [(1, 100), (16, 96)])
def test_a_prefix_shared_by_requests_that_come_together_is_computed_once(
    new_scheduler: New, page_size: int, computed_once: int
) -> None:
    scheduler = new_scheduler(page_size=page_size)
    prefix = [(11 * i) % 900 for i in range(100)]
    prompts = [[*prefix, 901 + i, *range(20)] for i in range(8)]
    answers = run(scheduler, *(make_request(f"r{i}", p, 8) for i, p in enumerate(prompts)))
    assert [answers[f"r{i}"].ids for i in range(8)] == [expected_output(p, 8) for p in prompts]
    assert scheduler.worker.rows["extend"] == computed_once + 8 * (121 - computed_once)
    assert scheduler.worker.forwards["extend"] == 2
    assert sorted(a.cached_tokens for a in answers.values()) == [0] + 7 * [computed_once]


def test_equal_prompts_share_all_but_the_last_token(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    run(scheduler, *(make_request(f"r{i}", DISTINCT[0], 8) for i in range(8)))
    assert scheduler.worker.rows["extend"] == 40 + 7
    assert scheduler.worker.forwards == {"extend": 2, "decode": 7}


def test_a_prefix_being_computed_in_chunks_is_waited_for(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=16)
    prefix = [(11 * i) % 900 for i in range(96)]
    run(scheduler, *(make_request(f"r{i}", [*prefix, 901 + i], 4) for i in range(4)))
    assert scheduler.worker.rows["extend"] == 97 + 3


def test_a_chunk_can_be_shared_before_its_prompt_is_complete(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=64)
    prefix = [(11 * i) % 900 for i in range(64)]
    run(
        scheduler,
        make_request("a", [*prefix, *range(901, 921)], 2),
        make_request("b", [*prefix, *range(9)], 2),
    )
    assert scheduler.worker.forwards["extend"] == 2 and scheduler.worker.rows["extend"] == 84 + 9


def test_those_who_share_nothing_do_not_wait_for_the_shared_prefix(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    shared = [make_request(f"s{i}", [*range(100, 200), i], 4) for i in range(3)]
    run(scheduler, *shared, make_request("other", DISTINCT[0], 4))
    assert scheduler.worker.batch_sizes[0] == 2  # the first sharer and the other one


def test_nobody_waits_for_a_prefix_where_nothing_is_cached(new_scheduler: New) -> None:
    scheduler = new_scheduler(disable_radix_cache=True)
    answers = run(scheduler, *(make_request(f"r{i}", DISTINCT[0], 8) for i in range(8)))
    assert scheduler.worker.forwards == {"extend": 1, "decode": 7}
    assert all(a.cached_tokens == 0 for a in answers.values())


def test_a_second_turn_reuses_prompt_and_answer_of_the_first(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    first = run(scheduler, make_request("a", DISTINCT[0], 20))["a"].ids
    second = [*DISTINCT[0], *first, 1, 2, 3]
    answer = run(scheduler, make_request("b", second, 4))["b"]
    assert answer.cached_tokens == 40 + 19  # the last token drawn never entered the cache
    assert answer.ids == expected_output(second, 4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_prefix_is_shared_between_extra_keys(new_scheduler: New, page_size: int) -> None:
    scheduler = new_scheduler(page_size=page_size)
    keys = [None, "a", "b", "a"]
    got = [
        run(scheduler, make_request(f"r{i}", DISTINCT[0], 2, extra_key=key))[f"r{i}"].cached_tokens
        for i, key in enumerate(keys)
    ]
    assert got[:3] == [0, 0, 0] and got[3] >= 32


def test_requests_of_different_keys_that_come_together_do_not_wait_for_each_other(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    run(scheduler, *(make_request(f"r{i}", DISTINCT[0], 2, extra_key=f"k{i}") for i in range(4)))
    assert scheduler.worker.forwards["extend"] == 1 and scheduler.worker.rows["extend"] == 160


def test_a_request_without_new_tokens_computes_its_prompt_and_ends(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    answer = run(scheduler, make_request("r", DISTINCT[0], 0))["r"]
    assert answer.ids == [] and answer.completion_tokens == 0
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"
    assert scheduler.worker.forwards == {"extend": 1, "decode": 0}
    assert run(scheduler, make_request("next", DISTINCT[0], 2))["next"].cached_tokens == 39

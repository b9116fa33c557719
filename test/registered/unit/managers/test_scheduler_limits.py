"""What cannot be served is refused at once, with the numbers and the cure; neighbours notice nothing."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.limits import SchedulerLimits
from sglang.srt.runtime_context import SpawnRanks, get_context, get_schedule, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.fake_worker import FakeWorker, expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
SMALL = [1, 2, 3]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_the_pool_can_never_hold_is_refused_with_both_numbers(
    new_scheduler: New, page_size: int
) -> None:
    """Longer than the pool, shorter than the context: it must not wait for ever or block the others."""
    scheduler = new_scheduler(pool_tokens=256, page_size=page_size, context_len=1024)
    got = run(scheduler, make_request("big", [5] * 300, 8), make_request("small", SMALL, 4))
    reason = got["big"].finish_reason
    assert reason is not None and (reason.type, reason.status_code) == ("abort", 400)
    assert "300" in (reason.message or "") and "256" in (reason.message or "")
    assert got["small"].ids == expected_output(SMALL, 4)


def test_the_largest_prompt_that_fits_is_served(new_scheduler: New) -> None:
    scheduler = new_scheduler(pool_tokens=256)
    prompt = [(3 * i) % 900 for i in range(255)]
    got = run(scheduler, make_request("fits", prompt, 2), make_request("not", [*prompt, 1], 2))
    assert got["fits"].ids == expected_output(prompt, 2)
    assert got["not"].finish_reason is not None and got["not"].finish_reason.status_code == 400


def test_a_prompt_as_long_as_the_context_is_refused_in_the_words_clients_look_for(new_scheduler: New) -> None:
    scheduler = new_scheduler(context_len=64)
    got = run(scheduler, make_request("at", [5] * 64, 8), make_request("below", [5] * 63, 100))
    reason = got["at"].finish_reason
    assert reason is not None and reason.status_code == 400
    assert "longer than the model's context length" in (reason.message or "")
    assert got["below"].ids == expected_output([5] * 63, 1)
    assert got["below"].finish_reason is not None and got["below"].finish_reason.type == "length"


def test_a_full_queue_answers_503(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=1, max_queued_requests=2)
    scheduler.channel.inbox.append(make_request("runs", SMALL, 10))
    scheduler.step()
    got = run(scheduler, *(make_request(f"r{i}", [*SMALL, i], 3) for i in range(4)))
    for rid in ("r2", "r3"):
        reason = got[rid].finish_reason
        assert (
            reason is not None
            and reason.status_code == 503
            and reason.message == "The request queue is full."
        )
    assert [got[f"r{i}"].ids for i in range(2)] == [expected_output([*SMALL, i], 3) for i in range(2)]
    assert len(run(scheduler, make_request("later", SMALL, 3))["later"].ids) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids_logprob": [1, 5000], "return_logprob": True}, ["token_ids_logprob", "5000"]),
        ({"top_logprobs_num": 1001, "return_logprob": True}, ["top_logprobs_num", "1001", "1000"]),
        ({"logit_bias": {1000: 1.0}}, ["logit_bias", "1000"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
    ],
)
def test_an_id_outside_the_vocabulary_fails_its_own_request(
    new_scheduler: New, fields: dict[str, Any], words: list[str]
) -> None:
    scheduler = new_scheduler()
    got = run(scheduler, make_request("ok", SMALL, 4), make_request("bad", SMALL, 4, **fields))
    reason = got["bad"].finish_reason
    assert (
        reason is not None
        and reason.status_code == 400
        and all(word in (reason.message or "") for word in words)
    )
    assert got["ok"].ids == expected_output(SMALL, 4)


def test_bad_and_missing_prompt_ids_are_refused(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    got = run(
        scheduler,
        make_request("high", [1, 1000], 4),
        make_request("low", [-1], 4),
        make_request("none", [], 4),
    )
    assert all(a.finish_reason and a.finish_reason.status_code == 400 for a in got.values()) and len(got) == 3


def test_a_failed_row_fails_its_request_alone(new_scheduler: New) -> None:
    scheduler = new_scheduler(page_size=16)
    scheduler.worker.failure = lambda ids: "logits are not finite" if 777 in ids and len(ids) > 25 else None
    got = run(scheduler, make_request("bad", [777, *range(20)], 20), make_request("ok", list(range(30)), 20))
    reason = got["bad"].finish_reason
    assert reason is not None and (reason.type, reason.status_code) == ("abort", 500)
    assert reason.message == "logits are not finite"
    assert got["bad"].ids == expected_output([777, *range(20)], 20)[:5]
    assert got["ok"].ids == expected_output(list(range(30)), 20)


def test_what_a_failed_row_computed_is_not_shared(new_scheduler: New) -> None:
    """Keys and values that led to NaN must not reach the next request with this prefix."""
    scheduler = new_scheduler()
    scheduler.worker.failure = lambda ids: "logits are not finite" if len(ids) > 25 else None
    partial = run(scheduler, make_request("bad", list(range(20)), 20))["bad"].ids
    assert len(partial) == 6
    scheduler.worker.failure = None
    prompt = [*range(20), *partial, 5]
    answer = run(scheduler, make_request("next", prompt, 3))["next"]
    assert answer.cached_tokens == 20 and answer.ids == expected_output(prompt, 3)


def test_a_row_that_fails_with_its_prompt_leaves_nothing_behind(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=16)
    scheduler.worker.failure = lambda ids: "logits are not finite" if 777 in ids else None
    got = run(scheduler, make_request("bad", [777] * 40, 20), make_request("ok", SMALL, 5))
    assert got["bad"].ids == [] and got["ok"].ids == expected_output(SMALL, 5)
    assert scheduler.kv.used() == 0


def test_a_token_outside_the_vocabulary_fails_its_request_alone(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.worker.next_token = lambda ids: 1000 if ids[0] == 7 else 5
    got = run(scheduler, make_request("bad", [7, 8], 5), make_request("ok", SMALL, 5))
    assert got["bad"].finish_reason is not None and got["bad"].finish_reason.status_code == 500
    assert "1000" in (got["bad"].finish_reason.message or "")
    assert got["ok"].ids == [5] * 5


def test_an_unresolved_chunk_size_is_an_error_with_the_cure(new_scheduler: New) -> None:
    with pytest.raises(RuntimeError, match=r"chunked_prefill_size.*resolve"):
        new_scheduler(chunked_prefill_size=None)


def decided() -> dict[str, Any]:
    """What was replaced after publish, by name; each by the scheduler."""
    log = get_context().overrides_log()
    assert {entry.source for entry in log} <= {"scheduler"}
    return {entry.name: entry.after for entry in log}


def test_what_the_pool_made_of_the_flags_is_published_and_logged(new_scheduler: New) -> None:
    """Otherwise the flag says one number, the scheduler holds to another, and /placement shows neither."""
    new_scheduler(pool_tokens=256, max_requests=8, max_running_requests=20, max_total_tokens=4096)
    assert decided() == {"max_total_tokens": 256, "max_running_requests": 8}
    schedule = get_schedule()
    assert (schedule.max_total_tokens, schedule.max_running_requests) == (256, 8)


def test_flags_that_came_out_as_said_are_no_decision(new_scheduler: New) -> None:
    new_scheduler(pool_tokens=256, max_requests=8, max_running_requests=8, max_total_tokens=256)
    assert decided() == {}


def test_the_published_limit_counts_the_requests_of_all_replicas() -> None:
    """Nine requests over two replicas are four each; read again, eight are four each as well."""
    record = ServerArgs(
        model_path="dummy", tp_size=2, dp_size=2, enable_dp_attention=True, max_running_requests=9,
        chunked_prefill_size=512, page_size=1,
    )  # fmt: skip
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=1))
    worker = FakeWorker(pool_tokens=256, page_size=1, max_requests=64, context_len=64)
    for _ in range(2):
        limits = SchedulerLimits.from_published(worker)
        limits.override_published()
        assert limits.max_running_requests == 4 and get_schedule().max_running_requests == 8
    assert decided() == {"max_total_tokens": 256, "max_running_requests": 8}

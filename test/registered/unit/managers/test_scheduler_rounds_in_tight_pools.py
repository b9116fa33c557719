"""Rounds of several slots in full pools: retracted, narrow, aborted or ended, and never a token less."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import random
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.fake_worker import expected_logprobs, expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPTS = [[(start + 7 * i) % 900 for i in range(30)] for start in range(0, 400, 50)]
PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])
WIDTHS = pytest.mark.parametrize("slots_per_step", [2, 6, 20])


def assert_empty(scheduler: Scheduler) -> None:
    scheduler.invariants.check_idle()
    assert scheduler.kv.used() == 0
    scheduler.kv.flush()
    assert scheduler.kv.allocator.available_size() == scheduler.kv.size


@PAGES
@WIDTHS
@pytest.mark.parametrize("cached", [True, False])
def test_requests_retracted_between_rounds_go_on_without_a_gap(
    new_scheduler: New, page_size: int, slots_per_step: int, cached: bool
) -> None:
    scheduler = new_scheduler(
        pool_tokens=320,
        page_size=page_size,
        slots_per_step=slots_per_step,
        num_recent_ids=4,
        schedule_conservativeness=0.0,
        disable_radix_cache=not cached,
    )
    fields = {"stream": True, "return_logprob": True, "logprob_start_len": 5, "top_logprobs_num": 2}
    got = run(scheduler, *(make_request(f"r{i}", p, 60, **fields) for i, p in enumerate(PROMPTS)))
    ask = LogprobRequest(top_num=2)
    for i, prompt in enumerate(PROMPTS):
        answer = got[f"r{i}"]
        assert answer.ids == expected_output(prompt, 60)
        assert answer.output_logprobs == expected_logprobs([*prompt, *answer.ids], 30, ask)
        assert answer.input_logprobs is not None and len(answer.input_logprobs) == 25
    assert sum(answer.num_retractions for answer in got.values()) > 0
    assert_empty(scheduler)


@PAGES
@WIDTHS
@pytest.mark.parametrize("length", [40, 61, 62, 63])
@pytest.mark.parametrize("all_wrong", [True, False])
def test_a_request_that_fills_the_pool_ends_at_the_token_at_which_it_ends_without_a_draft(
    new_scheduler: New, page_size: int, slots_per_step: int, length: int, all_wrong: bool
) -> None:
    """64 tokens in the cache, and the one drawn from the last of them; its last rounds are narrow."""
    prompt = [(7 * i) % 900 for i in range(length)]
    told = []
    for width in (1, slots_per_step):
        scheduler = new_scheduler(pool_tokens=64, page_size=page_size, slots_per_step=width)
        if all_wrong:
            scheduler.worker.num_correct = lambda ids: 0
        answer = run(scheduler, make_request("big", prompt, 200))["big"]
        told.append((answer.ids, answer.finish_reason))
        widths = list(scheduler.worker.widths)
        assert run(scheduler, make_request("next", [1, 2], 4))["next"].ids == expected_output([1, 2], 4)
        assert_empty(scheduler)
    assert told[0] == told[1] and len(told[1][0]) == 64 - length + 1
    full = widths.count(slots_per_step)
    assert widths == [slots_per_step] * full + [1] * (len(widths) - full)
    if all_wrong:  # a full round at every position from which the pool has all its slots
        assert len(widths) == 64 - length and full == max(64 - slots_per_step - length + 1, 0)


@PAGES
def test_a_pool_that_holds_exactly_one_request_serves_it_whole(new_scheduler: New, page_size: int) -> None:
    """The newest token needs no slot: 24 prompt and 41 output tokens in 64 slots."""
    scheduler = new_scheduler(pool_tokens=64, page_size=page_size, slots_per_step=6)
    prompts = [[first, *PROMPTS[0][:23]] for first in range(3)]
    got = run(scheduler, *(make_request(f"r{i}", p, 41) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        reason = got[f"r{i}"].finish_reason
        assert got[f"r{i}"].ids == expected_output(prompt, 41)
        assert reason is not None and (reason.type, reason.message) == ("length", None)
    assert 1 in scheduler.worker.widths
    assert_empty(scheduler)


@pytest.mark.parametrize(("pool_tokens", "slots_per_step"), [(96, 8), (160, 30)])
def test_only_the_last_request_takes_narrow_rounds(
    new_scheduler: New, pool_tokens: int, slots_per_step: int
) -> None:
    """Two that do not both find a full round do not go on narrowly together: one is retracted.

    30 slots are more than the tokens that a retraction keeps room for, so it must count the round as well.
    """
    scheduler = new_scheduler(
        pool_tokens=pool_tokens, slots_per_step=slots_per_step, schedule_conservativeness=0.0
    )
    seen: list[tuple[int, int]] = []
    forward = scheduler.worker.forward_batch_generation

    def noting(batch: ForwardBatch) -> GenerationBatchResult:
        if batch.forward_mode is ForwardMode.DECODE:
            seen.append((batch.batch_size, batch.slots_per_request))
        return forward(batch)

    scheduler.worker.forward_batch_generation = noting
    got = run(scheduler, *(make_request(f"r{i}", p, 66) for i, p in enumerate(PROMPTS[:3])))
    assert all(got[f"r{i}"].ids == expected_output(p, 66) for i, p in enumerate(PROMPTS[:3]))
    assert scheduler.load.num_retractions > 0
    full = {size for size, width in seen if width == slots_per_step}
    assert {size for size, width in seen if width == 1} <= {1} < full


@PAGES
def test_admission_keeps_room_for_the_last_round_of_everybody(new_scheduler: New, page_size: int) -> None:
    """With the whole allowed output counted at admission nobody is retracted, wrong drafts included.

    Three requests of 96 tokens fit the pool; with a round of 17 slots behind them only two do.
    """
    most = []
    for slots_per_step in (1, 17):
        scheduler = new_scheduler(
            pool_tokens=3 * 96,
            page_size=page_size,
            slots_per_step=slots_per_step,
            schedule_conservativeness=10.0,
        )
        got = run(scheduler, *(make_request(f"r{i}", p, 66) for i, p in enumerate(PROMPTS)))
        assert all(got[f"r{i}"].ids == expected_output(p, 66) for i, p in enumerate(PROMPTS))
        assert scheduler.load.num_retractions == 0
        most.append(max(scheduler.worker.batch_sizes))
    assert most == [3, 2]


@PAGES
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("neighbour", [True, False])
def test_an_abort_between_rounds_returns_the_tokens_so_far_and_the_reserve(
    new_scheduler: New, page_size: int, steps: int, neighbour: bool
) -> None:
    scheduler = new_scheduler(page_size=page_size, slots_per_step=6)
    scheduler.channel.inbox.append(make_request("r", PROMPTS[0], 300, stream=True))
    if neighbour:
        scheduler.channel.inbox.append(make_request("n", PROMPTS[1], 50))
    for _ in range(steps):
        scheduler.step()
        scheduler.invariants.check_sum()
    got = run(scheduler, AbortReq(rid="r"))
    ids, reason = got["r"].ids, got["r"].finish_reason
    assert reason is not None and reason.type == "abort"
    assert len(ids) >= steps and ids == expected_output(PROMPTS[0], len(ids))
    if neighbour:
        assert got["n"].ids == expected_output(PROMPTS[1], 50)
    known = 30 + len(ids) - 1
    again = run(scheduler, make_request("again", [*PROMPTS[0], *ids, 1, 2], 5))["again"]
    assert again.cached_tokens == known // page_size * page_size
    assert again.ids == expected_output([*PROMPTS[0], *ids, 1, 2], 5)
    assert_empty(scheduler)


def test_forty_requests_for_one_token_pass_a_batch_of_four_and_leave_room(new_scheduler: New) -> None:
    """They only run the first pass; their end must count as the end of a running request does."""
    scheduler = new_scheduler(slots_per_step=6, max_running_requests=4)
    prompts = [[i, *PROMPTS[0]] for i in range(40)]
    got = run(scheduler, *(make_request(f"r{i}", p, 1) for i, p in enumerate(prompts)))
    assert [got[f"r{i}"].ids for i in range(40)] == [expected_output(p, 1) for p in prompts]
    assert scheduler.worker.forwards["decode"] == 0
    assert run(scheduler, make_request("later", PROMPTS[1], 20))["later"].ids == expected_output(
        PROMPTS[1], 20
    )
    assert_empty(scheduler)


def mixed_request(place: int, chance: random.Random) -> TokenizedGenerateReqInput:
    prompt = [*PROMPTS[0][: chance.randrange(0, 30)], *chance.choices(range(900), k=chance.randrange(1, 20))]
    fields: dict[str, Any] = {"stream": chance.random() < 0.5}
    if chance.random() < 0.3:
        fields |= {"return_logprob": True, "logprob_start_len": chance.choice([-1, 0])}
    if chance.random() < 0.2:
        fields["stop_token_ids"] = chance.sample(range(900), 200)
    if chance.random() < 0.1:
        fields["stop"] = [chr(chance.randrange(97, 123))]
    return make_request(f"r{place}-", prompt, chance.choice([0, 1, 2, 7, 30, 60]), **fields)


def assert_right(message: TokenizedGenerateReqInput, answer: Answer) -> None:
    reason, spec = answer.finish_reason, answer.spec
    assert reason is not None and spec is not None
    assert answer.ids == expected_output(message.input_ids, len(answer.ids))
    if reason.type == "length" and reason.message is None:
        assert len(answer.ids) == message.sampling_params.max_new_tokens
    assert not message.return_logprob or len(answer.output_logprobs) == len(answer.ids)
    assert sum(spec.histogram) == spec.num_rounds
    emitted = spec.num_rounds + spec.num_correct_drafts
    prefills = min(len(answer.ids), 1) + answer.num_retractions
    assert emitted >= len(answer.ids) - prefills, "a token came from nowhere"


@pytest.mark.parametrize("page_size", [1, 16])
def test_five_hundred_mixed_requests_leave_the_pool_empty(new_scheduler: New, page_size: int) -> None:
    chance = random.Random(page_size)
    scheduler = new_scheduler(
        pool_tokens=256,
        page_size=page_size,
        slots_per_step=5,
        max_running_requests=12,
        chunked_prefill_size=24,
    )
    sent = [mixed_request(i, chance) for i in range(500)]
    waiting = list(sent)
    while waiting:
        for _ in range(min(chance.randrange(0, 5), len(waiting))):
            scheduler.channel.inbox.append(waiting.pop())
        if chance.random() < 0.2:
            scheduler.channel.inbox.append(AbortReq(rid=f"r{chance.randrange(500)}-"))
        scheduler.step()
        scheduler.invariants.check_sum()
        scheduler.invariants.check_lengths()
        if len(waiting) % 4 == 0:
            scheduler.invariants.check_slots()
    got = run(scheduler)
    assert len(got) == 500
    for message in sent:
        assert_right(message, got[message.rid])
    kinds = {answer.finish_reason.type for answer in got.values() if answer.finish_reason}
    assert kinds == {"stop", "length", "abort"} and scheduler.load.num_retractions > 0
    assert_empty(scheduler)

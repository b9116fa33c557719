"""Verify rounds give several tokens a step, and every answer is the one that plain decoding gives."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import SpecCounts
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.fake_worker import (
    EOS_ID,
    FakeTokenizer,
    expected_output,
    fake_next_token,
    prefix_states,
)
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPT = [(7 * i) % 900 for i in range(21)]
#: Nodes of a round. With every draft right the first round emits the tokens 2 to 5, the second 6 to 9.
WIDTH = 4
FIRST, MIDDLE, LAST = 6, 7, 9
PLACES = pytest.mark.parametrize("count", [FIRST, MIDDLE, LAST])
PAGES = pytest.mark.parametrize("page_size", [1, 4])


def forced(tokens: dict[int, int]) -> Callable[[list[int]], int]:
    """The usual next token, but output token number n of a prompt as long as PROMPT is `tokens[n]`."""

    def next_token(ids: list[int]) -> int:
        usual = fake_next_token(int(prefix_states(np.array(ids))[-1]))
        return tokens.get(len(ids) - len(PROMPT) + 1, usual)

    return next_token


def told(answer: Answer) -> list[Any]:
    """What must not depend on a draft."""
    return [
        answer.ids,
        answer.finish_reason,
        answer.completion_tokens,
        answer.output_logprobs,
        answer.input_logprobs,
        answer.cached_tokens,
    ]


def play(
    scheduler: Scheduler, *, num_correct: int, worker: dict[str, Any], count: int, **request: Any
) -> list[Any]:
    """The request beside a neighbour that goes on: both answers, and what stays cached of the request."""
    scheduler.worker.num_correct = lambda ids: num_correct
    for name, value in worker.items():
        setattr(scheduler.worker, name, value)
    fields = {"return_logprob": True, "top_logprobs_num": 2, **request}
    message = make_request("r", PROMPT, count, **fields)
    got = run(scheduler, message, make_request("neighbour", PROMPT[:9], 30, ignore_eos=True))
    sequence = np.array([*PROMPT, *got["r"].ids, 1, 2, 3, 4])
    cached = len(scheduler.kv.prefix_cache.match_prefix(None, sequence))
    assert scheduler.kv.used() == 0
    return [told(got["r"]), got["neighbour"].ids, cached]


def assert_as_without_a_draft(
    new_scheduler: New,
    *,
    page_size: int,
    count: int,
    context_len: int = 2048,
    worker: Any = None,
    **request: Any,
) -> list[Any]:
    """With drafts that are all right, partly right and all wrong; gives what was told of the request."""
    fields = {"page_size": page_size, "context_len": context_len}
    plain = play(new_scheduler(**fields), num_correct=0, worker=worker or {}, count=count, **request)
    for num_correct in (WIDTH - 1, 1, 0):
        scheduler = new_scheduler(slots_per_step=WIDTH, **fields)
        answers = play(scheduler, num_correct=num_correct, worker=worker or {}, count=count, **request)
        assert answers == plain
        assert set(scheduler.worker.widths) == {WIDTH}
    told_of_request: list[Any] = plain[0]
    return told_of_request


@PLACES
@PAGES
@pytest.mark.parametrize("streams", [True, False])
def test_an_end_id_within_a_run_ends_the_answer_there(
    new_scheduler: New, count: int, page_size: int, streams: bool
) -> None:
    for end, extra in ((EOS_ID, {}), (777, {"stop_token_ids": [777]})):
        ids, reason, *_ = assert_as_without_a_draft(
            new_scheduler,
            page_size=page_size,
            count=40,
            worker={"next_token": forced({count: end})},
            stream=streams,
            **extra,
        )
        assert len(ids) == count and reason.type == "stop" and reason.matched == end


@PLACES
@PAGES
def test_a_stop_string_within_a_run_or_over_two_ends_the_answer_there(
    new_scheduler: New, count: int, page_size: int
) -> None:
    """With FIRST the string begins in the run before."""
    letters = {count - 1: ord("a"), count: ord("b")}
    ids, reason, *_ = assert_as_without_a_draft(
        new_scheduler, page_size=page_size, count=40, worker={"next_token": forced(letters)}, stop=["ab"]
    )
    assert len(ids) == count and reason.matched == "ab"


@PLACES
@PAGES
def test_the_length_ends_an_answer_within_a_run(new_scheduler: New, count: int, page_size: int) -> None:
    ids, reason, *_ = assert_as_without_a_draft(new_scheduler, page_size=page_size, count=count)
    assert ids == expected_output(PROMPT, count) and reason.type == "length" and reason.length == count


@PLACES
@PAGES
def test_the_context_ends_an_answer_within_a_run(new_scheduler: New, count: int, page_size: int) -> None:
    """A round near the end has slots behind the context: the request table is wider."""
    ids, reason, *_ = assert_as_without_a_draft(
        new_scheduler, page_size=page_size, count=500, context_len=len(PROMPT) + count
    )
    assert len(ids) == count and reason.type == "length"


@PLACES
@PAGES
def test_a_failure_within_a_run_comes_after_the_tokens_before_it(
    new_scheduler: New, count: int, page_size: int
) -> None:
    def failure(ids: list[int]) -> str | None:
        return "broken" if len(ids) == len(PROMPT) + count else None

    ids, reason, *_ = assert_as_without_a_draft(
        new_scheduler, page_size=page_size, count=40, worker={"failure": failure}
    )
    assert len(ids) == count and (reason.type, reason.message, reason.status_code) == ("abort", "broken", 500)


def test_min_new_tokens_holds_within_a_run(new_scheduler: New) -> None:
    ends = forced({3: EOS_ID, 4: EOS_ID, 8: EOS_ID})
    ids, reason, *_ = assert_as_without_a_draft(
        new_scheduler, page_size=1, count=40, worker={"next_token": ends}, min_new_tokens=5
    )
    assert len(ids) == 8 and reason.matched == EOS_ID


@pytest.mark.parametrize("streams", [True, False])
def test_nothing_behind_a_repeated_stop_string_is_kept(new_scheduler: New, streams: bool) -> None:
    """Ids, log-probabilities and text end at the same token: ' ha' again and again, `stop=[' ha ha ha']`."""
    ha = [256 + ord("h"), ord("a")]
    tokens = {n: ha[(n - 2) % 2] for n in range(2, 40)}
    ids, reason, _, logprobs, *_ = assert_as_without_a_draft(
        new_scheduler,
        page_size=1,
        count=38,
        worker={"next_token": forced(tokens)},
        stop=[" ha ha ha"],
        stream=streams,
    )
    assert FakeTokenizer().decode(ids[1:]) == " ha ha ha" and reason.matched == " ha ha ha"
    assert [entry.token_id for entry in logprobs] == ids


def test_requests_whose_drafts_differ_share_a_batch(new_scheduler: New) -> None:
    """Each emits what its own drafts allow; fewer steps than tokens are needed."""
    scheduler = new_scheduler(slots_per_step=WIDTH)
    prompts = [[i, *PROMPT] for i in range(6)]
    got = run(scheduler, *(make_request(f"r{i}", p, 33) for i, p in enumerate(prompts)))
    assert [got[f"r{i}"].ids for i in range(6)] == [expected_output(p, 33) for p in prompts]
    assert 9 <= scheduler.worker.forwards["decode"] < 32
    events = {len(event) for answer in got.values() for event in answer.events}
    assert len({answer.spec.num_rounds for answer in got.values()}) > 1 and events == {33}


def test_a_stream_gets_the_tokens_of_a_round_together(new_scheduler: New) -> None:
    scheduler = new_scheduler(slots_per_step=WIDTH)
    scheduler.worker.num_correct = lambda ids: 2
    answer = run(scheduler, make_request("r", PROMPT, 9, stream=True))["r"]
    assert list(map(len, answer.events)) == [1, 3, 3, 2]


@pytest.mark.parametrize("slots_per_step", [1, WIDTH])
def test_more_tokens_than_a_row_has_slots_are_an_error(new_scheduler: New, slots_per_step: int) -> None:
    """The keys of such a token lie nowhere, or in the slots of another request."""
    scheduler = new_scheduler(slots_per_step=slots_per_step)
    forward = scheduler.worker.forward_batch_generation

    def too_many(batch: ForwardBatch) -> GenerationBatchResult:
        result = forward(batch)
        if batch.forward_mode is ForwardMode.DECODE:
            result.next_token_ids[0] = [5] * (slots_per_step + 1)
        return result

    scheduler.worker.forward_batch_generation = too_many
    with pytest.raises(RuntimeError, match=rf"gave {slots_per_step + 1} tokens for .* for {slots_per_step}:"):
        run(scheduler, make_request("r", PROMPT, 30))


# what is counted


def untruncated(length: int) -> Callable[[list[int]], int]:
    """Rounds whose drafts are right by the newest id, but none behind token number `length`."""
    return lambda ids: min(ids[-1] % WIDTH, length - 1 - (len(ids) - len(PROMPT)))


def test_the_tokens_of_all_rounds_and_the_first_are_the_answer(new_scheduler: New) -> None:
    scheduler = new_scheduler(slots_per_step=WIDTH)
    scheduler.worker.num_correct = untruncated(50)
    got = run(scheduler, *(make_request(f"r{i}", [i, *PROMPT[1:]], 50) for i in range(5)))
    counts = [answer.spec for answer in got.values()]
    for spec in counts:
        assert spec.num_rounds + spec.num_correct_drafts == 50 - 1
        assert sum(spec.histogram) == spec.num_rounds
        assert sum(c * rounds for c, rounds in enumerate(spec.histogram)) == spec.num_correct_drafts
        assert spec.num_proposed_drafts == spec.num_rounds * (WIDTH - 1)
    state = scheduler.load.state(0.5)
    assert (
        state["spec_verify_ct"] == sum(spec.num_rounds for spec in counts) == scheduler.worker.rows["decode"]
    )
    assert state["avg_spec_accept_length"] == pytest.approx(5 * 49 / sum(spec.num_rounds for spec in counts))
    assert state["num_generated_tokens"] == 5 * 50


def test_an_output_tells_the_counts_of_its_own_step(new_scheduler: New) -> None:
    scheduler = new_scheduler(slots_per_step=WIDTH)
    scheduler.worker.num_correct = lambda ids: 1
    run(scheduler, make_request("r", PROMPT, 7, stream=True))
    told = [output.spec for message in scheduler.channel.sent for output in message.outputs]
    assert told == [SpecCounts(n, n, 3 * n, [0, n] if n else []) for n in range(4)]


def test_tokens_that_an_end_cuts_off_count_as_right_drafts_and_not_as_generated(new_scheduler: New) -> None:
    """With every draft right the accept length is the width of a round, wherever an answer ends."""
    scheduler = new_scheduler(slots_per_step=WIDTH)
    scheduler.worker.num_correct = lambda ids: WIDTH - 1
    spec = run(scheduler, make_request("r", PROMPT, MIDDLE))["r"].spec
    assert spec == SpecCounts(2, 2 * (WIDTH - 1), 2 * (WIDTH - 1), [0, 0, 0, 2])
    state = scheduler.load.state(0.5)
    assert state["avg_spec_accept_length"] == WIDTH and state["num_generated_tokens"] == MIDDLE


def test_a_request_of_one_token_has_counts_of_nothing(new_scheduler: New) -> None:
    scheduler = new_scheduler(slots_per_step=WIDTH)
    assert run(scheduler, make_request("r", PROMPT, 1))["r"].spec == SpecCounts()
    assert scheduler.load.state(0.5)["avg_spec_accept_length"] is None


def test_without_a_draft_nothing_of_one_is_told(new_scheduler: New, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler = new_scheduler(decode_log_interval=2)
    assert run(scheduler, make_request("r", PROMPT, 9))["r"].spec is None
    state = scheduler.load.state(0.5)
    assert state["avg_spec_accept_length"] is None and not [key for key in state if key.startswith("spec_")]
    assert "Decode batch" in caplog.text and "accept" not in caplog.text


def test_the_decode_log_line_tells_the_acceptance_since_the_last_one(
    new_scheduler: New, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler = new_scheduler(slots_per_step=WIDTH, decode_log_interval=2)
    right = [3, 1, 0, 0]
    scheduler.worker.num_correct = lambda ids: right[len(scheduler.worker.widths) - 1]
    run(scheduler, make_request("r", PROMPT, 9))
    lines = [message for message in caplog.messages if message.startswith("Decode batch")]
    assert "accept len: 3.00, accept rate: 0.67, draft len: 3.00, cuda graph" in lines[0]
    assert "accept len: 1.00, accept rate: 0.00, draft len: 3.00, cuda graph" in lines[1]


# what a forward brings along


def watched(scheduler: Scheduler) -> list[ForwardBatch]:
    batches: list[ForwardBatch] = []
    forward = scheduler.worker.forward_batch_generation
    scheduler.worker.forward_batch_generation = lambda batch: (batches.append(batch), forward(batch))[1]
    return batches


@pytest.mark.parametrize("slots_per_step", [1, WIDTH])
def test_a_part_of_a_prompt_brings_the_token_that_follows_it(new_scheduler: New, slots_per_step: int) -> None:
    """After a retraction the tokens that were drawn before are prompt as well."""
    scheduler = new_scheduler(
        chunked_prefill_size=7,
        pool_tokens=96,
        schedule_conservativeness=0.0,
        disable_radix_cache=True,
        slots_per_step=slots_per_step,
    )
    followed: list[tuple[list[int], int | None]] = []
    forward = scheduler.worker.forward_batch_generation

    def noting(batch: ForwardBatch) -> GenerationBatchResult:
        result = forward(batch)
        assert (batch.next_prompt_ids is not None) == (batch.forward_mode is ForwardMode.EXTEND)
        for place, next_id in enumerate(batch.next_prompt_ids or ()):
            row, length = int(batch.req_pool_indices[place]), batch.seq_lens_list[place]
            slots = scheduler.worker.req_to_token_pool.host[row, :length]
            followed.append((scheduler.worker._ids_in_slots[slots].tolist(), next_id))
            assert (next_id is None) == (batch.sampling_states[place] is not None)
        return result

    scheduler.worker.forward_batch_generation = noting
    prompts = [[first, *PROMPT] for first in (1, 2, 3)]
    got = run(scheduler, *(make_request(f"r{i}", p, 40) for i, p in enumerate(prompts)))
    assert sum(answer.num_retractions for answer in got.values()) > 0
    parts = [(ids, next_id) for ids, next_id in followed if next_id is not None]
    texts = {p[0]: [*p, *expected_output(p, 40)] for p in prompts}
    assert [next_id for _, next_id in parts] == [texts[ids[0]][len(ids)] for ids, _ in parts]
    assert max(len(ids) for ids, _ in parts) > 22, "none of them lies behind a prompt"


def test_the_parts_of_one_prompt_bring_exactly_its_tokens(new_scheduler: New) -> None:
    scheduler = new_scheduler(chunked_prefill_size=8)
    batches = watched(scheduler)
    run(scheduler, make_request("r", PROMPT, 3), make_request("scored", PROMPT[3:], 0))
    follow = [ids for batch in batches if (ids := batch.next_prompt_ids)]
    assert follow[:2] == [[PROMPT[8]], [PROMPT[16]]] and follow[2][0] is None
    assert follow[-1] == [None], "a prompt that is only scored is complete all the same"


def test_a_decode_step_brings_its_slots_and_the_recent_tokens_where_they_are_asked_for(
    new_scheduler: New,
) -> None:
    """The fake worker compares the recent tokens with those in the slots."""
    for recent, wanted in ((0, None), (5, 5)):
        scheduler = new_scheduler(slots_per_step=WIDTH, num_recent_ids=recent)
        batches = watched(scheduler)
        run(scheduler, make_request("r", [3, 4], 12), make_request("s", PROMPT, 12))
        decodes = [batch for batch in batches if batch.forward_mode is ForwardMode.DECODE]
        assert {batch.slots_per_request for batch in decodes} == {WIDTH}
        if wanted is None:
            assert all(batch.recent_ids is None for batch in decodes)
        else:
            assert decodes[0].recent_ids is not None
            assert decodes[0].recent_ids[0] == [3, 4, *expected_output([3, 4], 1)]
            assert all(len(ids) == wanted for batch in decodes[2:] for ids in batch.recent_ids or [])

"""Streams go on while prompts arrive: with pieces that follow a clock, alone between prompts or in their
forwards, and the same tokens come out."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import group_channel
from sglang.srt.messages.io_struct import BatchTokenIDOutput
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import checked_step, make_request, run

New = Callable[..., Scheduler]
STREAM = [3, 1, 4, 1, 5]
PROMPTS = [[(7 * i + 31 * n) % 900 for i in range(600)] for n in range(6)]
BY_TIME = {"enable_dynamic_chunking": True, "chunked_prefill_size": 1024}
MIXED = BY_TIME | {"enable_mixed_chunk": True}
#: Of the machine that the clock plays.
FORWARD_SECONDS, TOKEN_SECONDS = 0.02, 0.001


@dataclass
class Machine:
    """A scheduler on a clock that only its forwards move, and when each request got tokens."""

    scheduler: Scheduler
    now: float = 1000.0
    times: dict[str, list[float]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_channel.time, "monotonic", lambda: self.now)
        forward = self.scheduler.worker.forward_batch_generation
        send = self.scheduler.channel.send

        def timed(batch: ForwardBatch) -> GenerationBatchResult:
            self.rows.append(batch.num_tokens)
            self.now += FORWARD_SECONDS + batch.num_tokens * TOKEN_SECONDS
            return forward(batch)

        def noted(message: Any) -> None:
            if isinstance(message, BatchTokenIDOutput):
                for output in message.outputs:
                    self.times.setdefault(output.rid, []).append(self.now)
            send(message)

        monkeypatch.setattr(self.scheduler.worker, "forward_batch_generation", timed)
        monkeypatch.setattr(self.scheduler.channel, "send", noted)

    def longest_gap(self, rid: str) -> float:
        times = self.times[rid]
        return max(late - early for early, late in itertools.pairwise(times))


def run_stream_and_prompts(machine: Machine) -> None:
    """A stream of 60 tokens, and prompts that arrive together after a few of them."""
    scheduler = machine.scheduler
    scheduler.channel.inbox.append(make_request("stream", STREAM, 60, stream=True))
    for _ in range(6):
        checked_step(scheduler)
    answers = run(scheduler, *(make_request(f"p{i}", p, 4, stream=True) for i, p in enumerate(PROMPTS)))
    assert answers["stream"].ids == expected_output(STREAM, 60)
    assert [answers[f"p{i}"].ids for i in range(6)] == [expected_output(p, 4) for p in PROMPTS]
    assert scheduler.kv.used() == 0


@pytest.fixture
def machine(new_scheduler: New, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def start(**fields: Any) -> Machine:
        made = Machine(new_scheduler(**{"pool_tokens": 8192, **fields}))
        made.watch(monkeypatch)
        return made

    return start


@pytest.mark.parametrize("fields", [BY_TIME, MIXED], ids=["in turns", "mixed"])
def test_a_stream_waits_at_most_three_steps_and_a_bit_while_prompts_arrive(
    machine: Callable[..., Machine], fields: dict[str, Any]
) -> None:
    made = machine(**fields)
    run_stream_and_prompts(made)
    assert made.longest_gap("stream") <= 3 * FORWARD_SECONDS + 0.3
    assert max(made.rows) > 150, "pieces grow to what the time allows"


def test_pieces_of_a_given_size_make_it_wait_for_all_prompts(machine: Callable[..., Machine]) -> None:
    made = machine(chunked_prefill_size=1024)
    run_stream_and_prompts(made)
    assert made.longest_gap("stream") > 3


def test_with_no_stream_running_prompts_are_cut_as_configured(machine: Callable[..., Machine]) -> None:
    made = machine(**BY_TIME)
    run(made.scheduler, make_request("p", PROMPTS[0], 1), make_request("q", PROMPTS[1], 1))
    assert made.rows == [1024, 176]


def test_mixed_forwards_decode_every_stream_and_cost_no_step_of_their_own(
    machine: Callable[..., Machine],
) -> None:
    made = machine(**MIXED)
    run_stream_and_prompts(made)
    worker = made.scheduler.worker
    in_turns = machine(**BY_TIME)
    run_stream_and_prompts(in_turns)
    assert worker.forwards["decode"] < in_turns.scheduler.worker.forwards["decode"]
    assert sum(worker.rows.values()) == sum(in_turns.scheduler.worker.rows.values())


def test_mixing_needs_no_clock(machine: Callable[..., Machine]) -> None:
    made = machine(chunked_prefill_size=100, enable_mixed_chunk=True)
    run_stream_and_prompts(made)
    assert made.longest_gap("stream") <= FORWARD_SECONDS + 0.11


@pytest.mark.parametrize("fields", [BY_TIME, MIXED, {"enable_mixed_chunk": True}], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_too_small_for_all_retracts_and_loses_nothing(
    machine: Callable[..., Machine], fields: dict[str, Any], page_size: int
) -> None:
    made = machine(**fields, pool_tokens=192, page_size=page_size, schedule_conservativeness=0.0)
    prompts = [p[:50] for p in PROMPTS]
    answers = run(
        made.scheduler, *(make_request(f"r{i}", p, 50, return_logprob=i == 2) for i, p in enumerate(prompts))
    )
    assert [answers[f"r{i}"].ids for i in range(6)] == [expected_output(p, 50) for p in prompts]
    assert len(answers["r2"].output_logprobs) == 50
    assert made.scheduler.load.num_retractions > 0
    assert made.scheduler.kv.used() == 0


def test_a_prompt_that_asks_for_logprobs_and_a_stream_that_does_share_forwards(
    machine: Callable[..., Machine],
) -> None:
    made = machine(**MIXED)
    made.scheduler.channel.inbox.append(make_request("stream", STREAM, 30, return_logprob=True))
    for _ in range(4):
        checked_step(made.scheduler)
    asks = {"return_logprob": True, "logprob_start_len": 0}
    answers = run(made.scheduler, *(make_request(f"p{i}", p, 3, **asks) for i, p in enumerate(PROMPTS)))
    assert len(answers["stream"].output_logprobs) == 30
    alone = run(machine(**BY_TIME).scheduler, make_request("p0", PROMPTS[0], 3, **asks))["p0"]
    assert answers["p0"].input_logprobs == alone.input_logprobs
    assert answers["p0"].output_logprobs == alone.output_logprobs


def test_a_stream_that_fails_in_a_mixed_forward_fails_alone(machine: Callable[..., Machine]) -> None:
    made = machine(**MIXED)
    made.scheduler.channel.inbox.append(make_request("stream", STREAM, 60))
    for _ in range(4):
        checked_step(made.scheduler)
    made.scheduler.worker.failure = lambda ids: "planted" if ids[:5] == STREAM and len(ids) > 12 else None
    answers = run(made.scheduler, *(make_request(f"p{i}", p, 4) for i, p in enumerate(PROMPTS)))
    reason = answers["stream"].finish_reason
    assert reason is not None and reason.message == "planted"
    assert answers["p5"].ids == expected_output(PROMPTS[5], 4)


def test_with_a_draft_prompts_and_rounds_take_turns_and_one_line_says_so(
    machine: Callable[..., Machine], caplog: pytest.LogCaptureFixture
) -> None:
    made = machine(**MIXED, slots_per_step=4)
    assert "enable_mixed_chunk has no effect with speculative decoding" in caplog.text
    run_stream_and_prompts(made)
    assert made.longest_gap("stream") <= 3 * FORWARD_SECONDS + 0.3

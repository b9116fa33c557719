"""The loop and its control messages: flush, counters, rest, heartbeat, shutdown, and errors that end it."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import logging
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    RankReady,
    ShutdownReq,
    encode,
)
from sglang.test.fakes.fake_channel import FakeChannel
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPT = [(7 * i) % 900 for i in range(40)]


def last(scheduler: Scheduler, kind: type) -> Any:
    return [message for message in scheduler.channel.sent if isinstance(message, kind)][-1]


def test_a_flush_empties_the_cache_when_nobody_uses_it(
    new_scheduler: New, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler = new_scheduler()
    run(scheduler, make_request("a", PROMPT, 4))
    run(scheduler, FlushCacheReqInput(call_id=7))
    answer = last(scheduler, FlushCacheReqOutput)
    assert (answer.call_id, answer.success) == (7, True) and "Cache flushed" in caplog.text
    assert scheduler.kv.allocator.available_size() == scheduler.kv.size
    assert run(scheduler, make_request("b", PROMPT, 4))["b"].cached_tokens == 0


def test_a_flush_is_refused_while_requests_run_or_wait(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=1)
    scheduler.channel.inbox.extend([make_request("a", PROMPT, 20), make_request("b", PROMPT, 20)])
    scheduler.step()
    scheduler.channel.inbox.append(FlushCacheReqInput(call_id=1))
    scheduler.step()
    answer = last(scheduler, FlushCacheReqOutput)
    assert not answer.success and "1 requests run and 1 wait" in answer.message
    assert run(scheduler)["b"].ids == expected_output(PROMPT, 20)


def test_the_counters_tell_what_runs_waits_and_is_used(new_scheduler: New) -> None:
    scheduler = new_scheduler(max_running_requests=2, pool_tokens=400)
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *PROMPT], 20) for i in range(3))
    scheduler.step()
    scheduler.channel.inbox.append(GetInternalStateReq(call_id=3))
    scheduler.step()
    answer = last(scheduler, GetInternalStateReqOutput)
    state = answer.state
    assert answer.call_id == 3
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_used_tokens"]) == (2, 1, 82)
    assert state["token_usage"] == pytest.approx(82 / 400) and state["max_total_num_tokens"] == 400
    encode(answer)  # plain values only
    run(scheduler)
    state = scheduler.load.state(0.5)
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_used_tokens"]) == (0, 0, 0)
    assert state["forward_ct"] == state["forward_ct_prefill"] + state["forward_ct_decode"]
    assert state["forward_ct_decode"] == scheduler.worker.forwards["decode"]


def test_the_hit_rate_is_cached_over_all_prompt_tokens(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    run(scheduler, make_request("a", PROMPT, 2))
    run(scheduler, make_request("b", PROMPT, 2))
    assert scheduler.load.state(0.0)["cache_hit_rate"] == pytest.approx(39 / 80)


def test_the_log_has_the_lines_that_scripts_match(
    new_scheduler: New, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler = new_scheduler(decode_log_interval=5)
    run(scheduler, make_request("a", PROMPT, 11))
    lines = [record.getMessage() for record in caplog.records]
    prefill = [line for line in lines if line.startswith("Prefill batch, ")]
    decode = [line for line in lines if line.startswith("Decode batch, ")]
    assert len(prefill) == 1 and len(decode) == 2
    assert "#new-seq: 1, #new-token: 40, #cached-token: 0, token usage: " in prefill[0]
    assert "#running-req: 1, #queue-req: 0, input throughput (token/s): " in prefill[0]
    assert "#running-req: 1, #token: 48, token usage: 0.01, cuda graph: False, gen throughput" in decode[0]
    assert decode[0].endswith("#queue-req: 0")


class Pulse:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def beat(self) -> None:
        self.calls.append("beat")

    def forward_begin(self) -> None:
        self.calls.append("begin")

    def forward_end(self) -> None:
        self.calls.append("end")


class EndingChannel(FakeChannel):
    """Says shutdown once the loop has rested twice."""

    def wait(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= 1.0, "an idle loop steps at least once a second"
        super().wait(timeout_s)
        if self.waits == 2:
            self.inbox.append(ShutdownReq())


def test_the_loop_works_rests_beats_and_ends(new_scheduler: New) -> None:
    pulse, channel = Pulse(), EndingChannel()
    scheduler = Scheduler(new_scheduler().worker, tokenizer=None, channel=channel, heartbeat=pulse)
    channel.inbox.append(make_request("a", PROMPT, 3))
    scheduler.run_event_loop()
    assert pulse.calls[:3] == ["begin", "end", "beat"] and pulse.calls.count("begin") == 3
    assert channel.waits == 2 and pulse.calls.count("beat") == 5


def test_a_shutdown_drops_what_still_runs(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.extend([make_request("a", PROMPT, 3), ShutdownReq()])
    scheduler.run_event_loop()
    assert scheduler.worker.forwards == {"extend": 0, "decode": 0}


def test_an_error_of_the_worker_leaves_the_loop(new_scheduler: New) -> None:
    """A loop that swallowed it would spin for ever with every client waiting."""
    pulse, scheduler = Pulse(), new_scheduler()

    def broken(batch: object) -> None:
        raise RuntimeError("kernel failed")

    scheduler.worker.forward_batch_generation = broken
    scheduler._heartbeat = pulse
    scheduler.channel.inbox.append(make_request("a", PROMPT, 3))
    with pytest.raises(RuntimeError, match="kernel failed"):
        scheduler.run_event_loop()
    assert pulse.calls == ["begin", "end"]


def test_a_message_for_somebody_else_is_an_error(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(RankReady(world_rank=0, info={}))
    with pytest.raises(RuntimeError, match="RankReady"):
        scheduler.step()


def test_a_stream_gets_its_first_token_at_once_and_then_every_interval(new_scheduler: New) -> None:
    scheduler = new_scheduler(stream_interval=4)
    got = run(scheduler, make_request("r", PROMPT, 11, stream=True))
    assert [len(event) for event in got["r"].events] == [1, 4, 4, 2]
    got = run(scheduler, make_request("own", PROMPT, 11, stream=True, stream_interval=6))
    assert [len(event) for event in got["own"].events] == [1, 6, 4]


def test_a_request_that_does_not_stream_is_reported_rarely(new_scheduler: New) -> None:
    got = run(new_scheduler(), make_request("r", PROMPT, 120))
    assert [len(event) for event in got["r"].events] == [50, 50, 20]


def test_the_news_of_a_step_are_one_message(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *PROMPT], 3, stream=True) for i in range(4))
    for _ in range(3):
        scheduler.step()
    assert [len(message.outputs) for message in scheduler.channel.sent] == [4, 4, 4]

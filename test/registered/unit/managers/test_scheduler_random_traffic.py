"""Random traffic: every request gets its own right answer once, and the sums hold after every step."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="unit-cpu")

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.messages.io_struct import AbortReq
from sglang.srt.runtime_context import reset_context
from sglang.test.fakes.fake_channel import answers
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request, run

BASE = [(13 * i) % 800 for i in range(70)]

requests = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 70),
        "own": st.lists(st.integers(0, 997), min_size=1, max_size=12),
        "max_new_tokens": st.integers(0, 40),
        "stream": st.booleans(),
        "extra_key": st.sampled_from([None, None, "salt"]),
        "logprob_start_len": st.sampled_from([-1, -1, 0, 10]),
    }
)
actions = st.one_of(
    st.tuples(st.just("send"), requests),
    st.tuples(st.just("send"), requests),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
)
configurations = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "pool_tokens": st.sampled_from([128, 192, 400]),
        "chunked_prefill_size": st.sampled_from([-1, 9, 32]),
        "max_running_requests": st.sampled_from([2, 5, 16]),
        "schedule_policy": st.sampled_from(["fcfs", "lpm"]),
        "schedule_conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
        "disable_radix_cache": st.sampled_from([False, False, True]),
        "slots_per_step": st.sampled_from([1, 1, 3, 8]),
        "num_recent_ids": st.sampled_from([0, 6]),
    }
)


@settings(max_examples=160, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(fields=configurations, script=st.lists(actions, min_size=1, max_size=30))
def test_every_request_gets_its_answer_and_the_books_add_up(
    fields: dict[str, Any], script: list[tuple[str, Any]]
) -> None:
    try:
        scheduler = create_scheduler(**fields)
        sent: dict[str, tuple[list[int], dict[str, Any]]] = {}
        for deed, what in script:
            if deed == "send":
                rid = f"r{len(sent)}-"
                prompt = [*BASE[: what["shared"]], *what["own"]]
                start = min(what["logprob_start_len"], len(prompt) - 1)
                message = make_request(
                    rid,
                    prompt,
                    what["max_new_tokens"],
                    stream=what["stream"],
                    extra_key=what["extra_key"],
                    return_logprob=start >= 0,
                    logprob_start_len=start,
                )
                sent[rid] = (prompt, what | {"start": start})
                scheduler.channel.inbox.append(message)
            elif deed == "abort":
                scheduler.channel.inbox.append(AbortReq(rid=f"r{what}-"))
            else:
                for _ in range(what):
                    scheduler.step()
                    scheduler.invariants.check_sum()
                    scheduler.invariants.check_lengths()
                    scheduler.invariants.check_slots()
        got = run(scheduler)
        scheduler.invariants.check_idle()
        assert scheduler.kv.used() == 0 and set(got) == set(sent)
        for rid, (prompt, what) in sent.items():
            answer, wanted = got[rid], what["max_new_tokens"]
            assert answer.finish_reason is not None
            truth = expected_output(prompt, wanted)
            assert answer.ids == truth[: len(answer.ids)]
            if answer.finish_reason.type == "length" and answer.finish_reason.message is None:
                assert len(answer.ids) == wanted
                if what["start"] >= 0:
                    assert answer.input_logprobs is not None
                    assert len(answer.input_logprobs) == len(prompt) - what["start"]
                    assert len(answer.output_logprobs) == wanted
            if answer.finish_reason.message is not None and answer.finish_reason.type == "length":
                assert len(prompt) + wanted > fields["pool_tokens"], "it was ended early although it fits"
        assert answers(scheduler.channel) == got
    finally:
        reset_context()

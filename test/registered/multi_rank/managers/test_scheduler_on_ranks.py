"""The scheduler on real ranks without a model: the same steps, plans, answers and ends everywhere."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="multi-rank-cpu")

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import group_channel
from sglang.srt.messages.io_struct import (
    AbortReq,
    DispatchedReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ShutdownReq,
)
from sglang.srt.runtime_context import get_parallel, reset_context
from sglang.test.fakes.fake_worker import expected_output
from sglang.test.fakes.scheduler_driver import create_scheduler, make_request
from sglang.test.multi_rank import run_ranks

PROMPT = [(7 * i) % 900 for i in range(60)]
#: Small enough that prompts are cut and requests are pushed back.
TIGHT = {
    "chunked_prefill_size": 16,
    "pool_tokens": 180,
    "max_running_requests": 8,
    "schedule_conservativeness": 0.1,
}
Script = dict[int, list[Any]]


class ScriptChannel:
    """A leader's channel: gives what the script has for a step, notes the steps after which it rested."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.steps = 0
        self.waits: list[int] = []
        self.sent: list[Any] = []

    def recv_all(self, most: int | None = None) -> list[Any]:
        self.steps += 1
        return self.script.get(self.steps - 1, [])

    def wait(self, timeout_s: float) -> None:
        self.waits.append(self.steps)

    def send(self, message: Any) -> None:
        self.sent.append(message)


@contextlib.contextmanager
def scheduler_on(rank: int, scripts: list[Script], **fields: Any) -> Iterator[Scheduler]:
    """This rank's scheduler; `scripts` is one per replica. Everything is taken down after the block."""
    scheduler = create_scheduler(world_rank=rank, **fields)
    parallel = get_parallel()
    if scheduler.channel is not None:
        script = scripts[parallel.attn_dp_rank if parallel.attn_dp_size > 1 else 0]
        channel = ScriptChannel(script)
        scheduler.channel = scheduler.group._channel = channel
    sent: list[Any] = []
    send = scheduler.streamer._send
    scheduler.streamer._send = lambda message: (sent.append(message), send(message))[1]
    scheduler.sent = sent
    try:
        yield scheduler
    finally:
        parallel_state.destroy_model_parallel()
        reset_context()


def last_step(scripts: list[Script]) -> int:
    return max(step for script in scripts for step in script)


def live(scheduler: Scheduler, scripts: list[Script], max_steps: int = 2000) -> list[Any]:
    """Step until the scripts and the work are over (every rank knows when); one entry a step, JSON-safe."""
    history = []
    for step in range(max_steps):
        going_on = scheduler.step()
        scheduler.invariants.check_sum()
        scheduler.invariants.check_slots()
        queues = scheduler.queues
        history.append(
            [
                [req.rid for req in queues.running],
                [req.rid for req in queues.waiting],
                scheduler.kv.room(),
                round(scheduler.planner.new_token_ratio, 9),
            ]
        )
        if not going_on and step > last_step(scripts):
            return history
    raise AssertionError(f"not done after {max_steps} steps")


def ids_sent(scheduler: Scheduler) -> dict[str, list[int]]:
    sent: dict[str, list[int]] = {}
    for message in scheduler.sent:
        for output in message.outputs:
            sent.setdefault(output.rid, []).extend(output.new_ids)
    return sent


def reasons_sent(scheduler: Scheduler) -> dict[str, str]:
    return {
        output.rid: output.finish_reason.type
        for message in scheduler.sent
        for output in message.outputs
        if output.finish_reason is not None
    }


def logprobs_sent(scheduler: Scheduler) -> list[Any]:
    return [
        [
            (entry.logprob, entry.token_id, entry.top)
            for entry in (output.input_logprobs or []) + (output.output_logprobs or [])
        ]
        for message in scheduler.sent
        for output in message.outputs
    ]


# plain tensor parallelism: two ranks hold the same requests


def mixed_traffic() -> Script:
    return {
        0: [make_request(f"r{i}", [i, *PROMPT[: 9 * i + 3]], 30 + i, ignore_eos=True) for i in range(5)],
        4: [
            make_request(
                "logprobs", PROMPT, 9, return_logprob=True, logprob_start_len=20, top_logprobs_num=2
            ),
            FlushCacheReqInput(call_id=1),
        ],
        9: [AbortReq(rid="r3"), make_request("wrong", [5000], 3)],
        30: [make_request("late", PROMPT, 12)],
    }


def two_ranks_one_replica(rank: int) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    scripts = [mixed_traffic()]
    with scheduler_on(rank, scripts, tp_size=2, **TIGHT) as scheduler:
        answer["history"] = live(scheduler, scripts)
        answer["ids"], answer["reasons"] = ids_sent(scheduler), reasons_sent(scheduler)
        answer["logprobs"] = logprobs_sent(scheduler)
        answer["retractions"] = scheduler.load.num_retractions
        answer["sent"] = 0 if scheduler.channel is None else len(scheduler.channel.sent)

    answer["expired"] = _expire_by_the_leaders_clock(rank)

    # Each rank would draw its own token: the leader's counts.
    scripts = [{0: [make_request("r", PROMPT, 5)]}]
    with scheduler_on(rank, scripts, tp_size=2) as scheduler:
        scheduler.worker.next_token = lambda ids: 100 + rank
        live(scheduler, scripts)
        answer["drawn"] = ids_sent(scheduler)["r"]

    # The loop itself: a peer rests nowhere and leaves with its leader.
    scripts = [{0: [make_request("r", PROMPT, 5)], 12: [ShutdownReq()]}]
    with scheduler_on(rank, scripts, tp_size=2) as scheduler:
        steps = _count_steps(scheduler)
        scheduler.run_event_loop()
        answer["steps"] = steps[0]
        answer["waits"] = None if scheduler.channel is None else scheduler.channel.waits
    answer["divergence"] = _diverge(rank)
    answer["paced"] = [_cut_by_the_leaders_clock(rank, mixed=mixed) for mixed in (False, True)]
    answer["rounds"] = _live_rounds(rank)
    return answer


def _count_steps(scheduler: Scheduler) -> list[int]:
    steps = [0]
    step = scheduler.step

    def counted() -> bool:
        steps[0] += 1
        return step()

    scheduler.step = counted
    return steps


def _expire_by_the_leaders_clock(rank: int) -> list[Any]:
    clock = group_channel.time
    now = [100.0]

    def tick() -> float:
        assert rank == 0, "a peer looked at its own clock"
        now[0] += 1.0
        return now[0]

    scripts = [{0: [make_request("r", PROMPT[:10], 100, ignore_eos=True)]}]
    with (
        envs.SGLANG_REQ_RUNNING_TIMEOUT.override(5.0),
        scheduler_on(rank, scripts, tp_size=2) as scheduler,
    ):
        group_channel.time = SimpleNamespace(monotonic=tick)
        try:
            history = live(scheduler, scripts)
        finally:
            group_channel.time = clock
        return [len(history), reasons_sent(scheduler)]


def _cut_by_the_leaders_clock(rank: int, *, mixed: bool) -> list[Any]:
    """A stream runs when long prompts come; steps take as long as the leader's uneven clock says."""
    clock = group_channel.time
    now = [100.0, 0.0]

    def tick() -> float:
        assert rank == 0, "a peer looked at its own clock"
        now[1] = (now[1] + 0.37) % 0.9
        now[0] += 0.1 + now[1]
        return now[0]

    prompts = {f"r{i}": [i, *PROMPT * 8] for i in range(3)}
    scripts = [
        {
            0: [make_request("stream", PROMPT[:10], 60, ignore_eos=True)],
            4: [make_request(rid, prompt, 5) for rid, prompt in prompts.items()],
        }
    ]
    fields = {"tp_size": 2, "enable_dynamic_chunking": True, "enable_mixed_chunk": mixed}
    with scheduler_on(rank, scripts, **fields) as scheduler:
        group_channel.time = SimpleNamespace(monotonic=tick)
        try:
            history = live(scheduler, scripts)
        finally:
            group_channel.time = clock
        ids = ids_sent(scheduler)
        assert all(ids[rid] == expected_output(prompt, 5) for rid, prompt in prompts.items())
        return [history, scheduler.worker.forwards, scheduler.worker.batch_sizes]


def _diverge(rank: int) -> str:
    """A planted mistake: rank 1 gives its next request other slots than rank 0 does."""
    scripts = [{0: [make_request("r", PROMPT, 5)]}]
    with scheduler_on(rank, scripts, tp_size=2) as scheduler:
        if rank == 0:
            scheduler.step()
            return ""
        scheduler.kv.allocator.alloc_extend(0, 3, 0)
        with pytest.raises(RuntimeError) as caught:
            scheduler.step()
        return str(caught.value)


@functools.cache
def answers_of_two_ranks() -> list[Any]:
    return run_ranks(two_ranks_one_replica, world_size=2)


def test_ranks_that_hold_the_same_requests_live_the_same_steps() -> None:
    first, second = answers_of_two_ranks()
    for name in ("history", "ids", "reasons", "logprobs", "expired", "drawn", "steps"):
        assert first[name] == second[name], name
    assert first["retractions"] == second["retractions"] > 0
    assert first["sent"] > 0 and second["sent"] == 0, "peers send nothing"
    assert first["reasons"]["r3"] == first["reasons"]["wrong"] == "abort" and len(first["reasons"]) == 8
    assert first["ids"]["r1"] == expected_output([1, *PROMPT[:12]], 31)
    assert first["ids"]["logprobs"] == expected_output(PROMPT, 9)
    assert first["expired"] == [8, {"r": "abort"}]
    assert first["drawn"] == [100] * 5
    assert first["steps"] == 13 and first["waits"] == list(range(5, 13)) and second["waits"] is None
    assert "another batch than its leader" in second["divergence"]


def test_ranks_cut_prompts_alike_by_the_clock_of_their_leader() -> None:
    first, second = answers_of_two_ranks()
    assert first["paced"] == second["paced"]
    for _, forwards, _ in first["paced"]:
        assert forwards["extend"] > 4, "it would be four in pieces of 512"


# attention data parallelism

#: Lengths are odd and uneven; the last prompt goes on where the one before ends, on the same replica.
PROMPTS = [
    [first, *PROMPT[: length - 1]]
    for first, length in ((0, 3), (1, 60), (2, 17), (3, 41), (4, 8), (5, 29), (5, 33))
]


def uneven_scripts() -> list[Script]:
    """Seven requests of 3 to 60 tokens, five of them on replica 0; replica 1 idles between and after."""
    requests = [make_request(f"r{i}", p, 6 + 3 * i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    return [
        {0: requests[:4], 9: [FlushCacheReqInput(call_id=1)], 11: [requests[4]]},
        {
            2: [requests[5]],
            14: [FlushCacheReqInput(call_id=2)],
            40: [requests[6], AbortReq(rid="nobody")],
            90: [GetInternalStateReq(call_id=3)],
        },
    ]


def replicas(rank: int, tp_size: int) -> dict[str, Any]:
    layout = {"tp_size": tp_size, "dp_size": 2, "enable_dp_attention": True}
    answer: dict[str, Any] = {}
    scripts = uneven_scripts()
    with scheduler_on(rank, scripts, **layout, **{**TIGHT, "pool_tokens": 90}) as scheduler:
        history = live(scheduler, scripts)
        answer["steps"], answer["replica"], answer["history"] = len(history), scheduler.dp_rank, history
        answer["ids"] = ids_sent(scheduler)
        answer["retractions"] = scheduler.load.num_retractions
        steps = scheduler.worker.steps
        answer["steps"] = [[step.num_tokens, step.num_logit_rows, step.is_extend] for step in steps]
        answer["idle"] = scheduler.load.num_idle_forwards
        answer["most"] = scheduler.load.state(0.5)["max_running_requests"]
        sent = [] if scheduler.channel is None else scheduler.channel.sent
        answer["flushes"] = [
            [message.call_id, message.success, message.dp_rank]
            for message in sent
            if isinstance(message, FlushCacheReqOutput)
        ]
        answer["states"] = [m.state for m in sent if isinstance(m, GetInternalStateReqOutput)]
        answer["dp_ranks"] = sorted({message.dp_rank for message in sent})
    answer["woken"] = _wake(rank, layout)
    answer["delayed"] = _delay(rank, layout)
    if tp_size == 4:
        answer["divergence"] = _plan_otherwise(rank, layout)
    answer["rounds"] = _rounds_of_replicas(rank, layout)
    return answer


def _wake(rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    """A request for replica 1 arrives two steps after its dispatch note; the ends of all loops."""
    scripts: list[Script] = [
        {5: [DispatchedReq(counts=[0, 1])], 30: [DispatchedReq(counts=[0, 2])]},
        {7: [make_request("r", PROMPT[:20], 4)], 33: [ShutdownReq()]},
    ]
    with scheduler_on(rank, scripts, **layout) as scheduler:
        steps = _count_steps(scheduler)
        scheduler.run_event_loop()
        return {
            "steps": steps[0],
            "waits": None if scheduler.channel is None else scheduler.channel.waits,
            "ids": ids_sent(scheduler),
            "forwards": len(scheduler.worker.batch_sizes),
        }


def _delay(rank: int, layout: dict[str, Any]) -> list[Any]:
    """Both replicas run one request; replica 0 gets a second one at once, replica 1 five steps later."""
    scripts: list[Script] = [
        {0: [make_request("a", PROMPT[:5], 40)], 4: [make_request("b", PROMPT[5:25], 10)]},
        {0: [make_request("c", PROMPT[:6], 40)], 9: [make_request("d", PROMPT[9:30], 10)]},
    ]
    answers = []
    for flags in ({"enable_prefill_delayer": True}, {}):
        with scheduler_on(rank, scripts, **layout, **flags) as scheduler:
            live(scheduler, scripts)
            extends = [i for i, step in enumerate(scheduler.worker.steps) if step.is_extend]
            answers.append([extends, sorted(map(len, ids_sent(scheduler).values()))])
    return answers


def _plan_otherwise(rank: int, layout: dict[str, Any]) -> str:
    """A planted mistake: the last rank plans differently from the one that holds the same requests."""
    scripts: list[Script] = [{0: []}, {0: [make_request("r", PROMPT[:20], 4)]}]
    with scheduler_on(rank, scripts, **layout) as scheduler:
        if rank == 3:
            plan = scheduler.planner.plan

            def shorter(**given: Any) -> Any:
                scheduler.queues.waiting[0].prompt_ids = scheduler.queues.waiting[0].prompt_ids[:19]
                return plan(**given)

            scheduler.planner.plan = shorter
        with pytest.raises(RuntimeError) as caught:
            scheduler.step()
        assert not scheduler.worker.batch_sizes, "it is noticed before the forward"
        return str(caught.value)


@functools.cache
def answers_of_replicas(world_size: int) -> list[Any]:
    return run_ranks(replicas, world_size=world_size, tp_size=world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_of_uneven_load_take_the_same_steps(world_size: int) -> None:
    """With four ranks each replica has two: what holds for a replica holds for both."""
    answers = answers_of_replicas(world_size)
    each = world_size // 2
    for rank, answer in enumerate(answers):
        leader = answers[rank - rank % each]
        for name in ("history", "ids", "retractions", "idle", "replica", "delayed"):
            assert answer[name] == leader[name], (rank, name)
        assert answer["steps"] == answers[0]["steps"], "all ranks ran the same forwards"
        assert answer["steps"] == answers[0]["steps"]
        assert answer["woken"]["steps"] == answers[0]["woken"]["steps"] == 34, "all leave in one step"
        assert answer["woken"]["forwards"] == answers[0]["woken"]["forwards"] == 4
        assert answer["most"] == 4, "8 running requests over two replicas"
        assert (answer["dp_ranks"] == []) == (rank % each > 0), "peers send nothing"
    first, second = answers[0], answers[each]
    assert (first["replica"], second["replica"]) == (0, 1)
    wanted = {f"r{i}": expected_output(prompt, 6 + 3 * i) for i, prompt in enumerate(PROMPTS)}
    assert first["ids"] | second["ids"] == wanted and set(second["ids"]) == {"r5", "r6"}
    assert first["retractions"] > 0 and first["idle"] > 0 and second["idle"] > 0
    assert all(sum(tokens) > 0 for tokens, _, _ in first["steps"]), "a step in which nobody has a token"
    assert [flush[1:] for flush in first["flushes"] + second["flushes"]] == [[False, 0], [False, 1]]
    (state,) = second["states"]
    assert (state["num_requests_received"], state["num_requests_finished"]) == (2, 2)
    assert (
        state["cache_hit_rate"] > 0.4 and state["dp_rank"] == 1 and state["num_generated_tokens"] == 21 + 24
    )

    # Replica 0's leader rests where nobody has work, but not in the steps between the note and the request.
    waits = answers[0]["woken"]["waits"]
    assert set(range(1, 34)) - set(waits) == {6, 7, *range(8, 12), 31, 32, 33}
    assert answers[each]["woken"]["waits"] == []
    assert answers[each]["woken"]["ids"] == {"r": expected_output(PROMPT[:20], 4)}

    if world_size == 4:
        for answer in answers:
            assert "TP ranks 2 and 3 hold the same requests" in answer["divergence"]
            assert "num_tokens 20 and 19" in answer["divergence"]
    delayed, free = first["delayed"]
    assert delayed[0] == [0, 9] and free[0] == [0, 4, 9]
    assert delayed[1] == free[1] == [10, 40]


# with a draft: decode steps are verify rounds


def _live_rounds(rank: int) -> dict[str, Any]:
    scripts = [mixed_traffic()]
    with scheduler_on(rank, scripts, tp_size=2, slots_per_step=4, num_recent_ids=5, **TIGHT) as scheduler:
        history = live(scheduler, scripts)
        return {
            "history": history,
            "ids": ids_sent(scheduler),
            "reasons": reasons_sent(scheduler),
            "logprobs": logprobs_sent(scheduler),
            "retractions": scheduler.load.num_retractions,
            "widths": scheduler.worker.widths,
        }


def test_ranks_that_hold_the_same_requests_live_the_same_rounds() -> None:
    first, second = (answer["rounds"] for answer in answers_of_two_ranks())
    assert first == second
    assert first["retractions"] > 0
    assert first["ids"]["r1"] == expected_output([1, *PROMPT[:12]], 31)
    assert first["ids"]["logprobs"] == expected_output(PROMPT, 9)


def _count_gathers() -> list[int]:
    gathers = [0]
    group = get_parallel().tp_group
    gather = group.all_gather

    def counted(*given: Any, **named: Any) -> Any:
        gathers[0] += 1
        return gather(*given, **named)

    group.all_gather = counted
    return gathers


def _rounds_of_replicas(rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    scripts = uneven_scripts()
    fields = {**TIGHT, "pool_tokens": 90, "slots_per_step": 4, "enable_prefill_delayer": True}
    with scheduler_on(rank, scripts, **layout, **fields) as scheduler:
        gathers = _count_gathers()
        per_step: list[int] = []
        step = scheduler.step

        def counted() -> bool:
            before = gathers[0]
            going_on = step()
            per_step.append(gathers[0] - before)
            return going_on

        scheduler.step = counted
        history = live(scheduler, scripts)
        return {
            "history": history,
            "ids": ids_sent(scheduler),
            "gathers": per_step,
            "forwards": scheduler.worker.forwards,
            "steps": [
                [step.is_extend, step.num_requests, step.slots_per_request] for step in scheduler.worker.steps
            ],
            "widths": scheduler.worker.widths,
        }


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_never_mix_prompts_and_rounds_and_meet_equally_often(world_size: int) -> None:
    """Busy and idle ones: a rank that skipped a vote or a phase would leave the others waiting."""
    answers = [answer["rounds"] for answer in answers_of_replicas(world_size)]
    each = world_size // 2
    for rank, answer in enumerate(answers):
        leader = answers[rank - rank % each]
        for name in ("history", "ids", "forwards", "widths"):
            assert answer[name] == leader[name], (rank, name)
        assert answer["gathers"] == answers[0]["gathers"] and answer["steps"] == answers[0]["steps"]
    first, second = answers[0], answers[each]
    wanted = {f"r{i}": expected_output(prompt, 6 + 3 * i) for i, prompt in enumerate(PROMPTS)}
    assert first["ids"] | second["ids"] == wanted
    # The delayer's vote, that on prompts and the agreement; a forward of prompts, or three phases of a round.
    assert set(first["gathers"]) == {3, 4, 6}, "nobody works, prompts, rounds"
    rounds = [requests for is_extend, requests, _ in first["steps"] if not is_extend]
    prompts = [requests for is_extend, requests, _ in first["steps"] if is_extend]
    assert first["gathers"].count(6) == len(rounds) and first["gathers"].count(4) == len(prompts)
    for name, answer, place in (("first", first, 0), ("second", second, 1)):
        assert answer["forwards"]["decode"] == sum(requests[place] > 0 for requests in rounds), name
        assert answer["forwards"]["extend"] == sum(requests[place] > 0 for requests in prompts), name
        assert answer["forwards"]["idle"] > 0, name
    assert any(min(requests) > 0 for requests in rounds) and any(min(requests) == 0 for requests in rounds)
    assert any(0 < requests[0] != requests[1] > 0 for requests in rounds), "unequal replicas in one round"
    assert {slots for is_extend, _, slots in first["steps"] if not is_extend} >= {4}

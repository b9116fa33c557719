"""Many short requests, sixteen at a time, with aborts and hang-ups in between: nothing is lost."""

from __future__ import annotations

import asyncio
import pathlib
import random
import signal

import httpx
import psutil
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.waiting import HANG_GUARD_S, wait_until

register_cpu_ci(est_time=45, suite="server-cpu")

NUM_REQUESTS = 500
#: Several ranks pay for every token with collectives; the same ways to end come about often enough.
NUM_REQUESTS_OF_A_LAYOUT = 120
CONCURRENCY = 16
#: What an allocator may keep; a request that leaked its state would cost far more, 250 times.
MEMORY_SLACK_BYTES = 24 << 20
#: An allocator grows until it has seen the worst moment of such traffic, a leak in every round.
MOST_ROUNDS = 4
FLAGS = ("--max-total-tokens", "1500", "--max-running-requests", "12")


def states(server: RunningServer) -> list[dict]:
    """What each replica counts."""
    return server.client.get("/server_info").json()["internal_states"]


def resident_bytes(server: RunningServer) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in [server.process.pid, *server.rank_pids()])


async def one_request(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """Send one request and end it in one of four ways; the way it ended is the answer."""
    body = {
        "text": f"shared words for {number % 7} " + "x" * rng.randrange(1, 60),
        "rid": f"r{number:04d}/",
        "sampling_params": {
            "max_new_tokens": rng.randrange(1, 40),
            "ignore_eos": rng.random() < 0.5,
            "temperature": 0.7,
        },
    }
    way = rng.choice(["whole", "whole", "stream", "abort", "hang up"])
    if way in ("stream", "hang up"):
        async with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in _lines(answer, 2 if way == "hang up" else None) if line]
        if way == "stream":
            assert lines[-1] == "data: [DONE]"
            assert '"finish_reason":null' not in lines[-2]
        return way
    if way == "abort":
        body["sampling_params"] = {"max_new_tokens": 300, "ignore_eos": True}
        running = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.wait({running}, timeout=rng.random() * 0.05)
        while not running.done():  # it may not have arrived yet when the first abort does
            await client.post("/abort_request", json={"rid": body["rid"]})
            await asyncio.wait({running}, timeout=0.02)
        answer = await running
    else:
        answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    assert meta["finish_reason"]["type"] in (("abort", "length") if way == "abort" else ("stop", "length"))
    assert meta["completion_tokens"] == len(answer.json()["output_ids"])
    return way


async def _lines(answer: httpx.Response, limit: int | None):
    seen = 0
    async for line in answer.aiter_lines():
        yield line
        seen += 1
        if limit is not None and seen >= limit:
            return


async def many(url: str, numbers: range, seed: int) -> list[str]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=2 * CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, limits=limits) as client:

        async def gated(number: int) -> str:
            async with gate:
                return await one_request(client, number, random.Random(rng.random()))

        return await asyncio.gather(*(gated(number) for number in numbers))


def is_idle(server: RunningServer) -> bool:
    return all(now["num_running_reqs"] == now["num_queue_reqs"] == 0 for now in states(server))


def soak(server: RunningServer, num_requests: int) -> None:
    """A leaked slot, state or connection would show in the counters, the memory or as a lost answer."""
    half = num_requests // 2
    ways: list[str] = []
    resident: list[int] = []
    for seed in range(MOST_ROUNDS):
        ways += asyncio.run(many(server.url, range(len(ways), len(ways) + half), seed))
        wait_until(lambda: is_idle(server), server.log)
        resident.append(resident_bytes(server))
        if seed > 0 and resident[-1] - resident[-2] < MEMORY_SLACK_BYTES:
            break
    else:
        raise AssertionError(f"every {half} requests more take more memory: {resident}")
    assert len(ways) >= num_requests
    assert {"whole", "stream", "abort", "hang up"} == set(ways)
    assert server.client.get("/flush_cache").status_code == 200
    assert [now["num_used_tokens"] for now in states(server)] == [0] * len(states(server))


def test_five_hundred_requests_with_aborts_leave_nothing_behind(model: pathlib.Path) -> None:
    with running_server(model, *FLAGS) as server:
        soak(server, NUM_REQUESTS)
        assert server.generate(text="after all", sampling_params={"max_new_tokens": 4}).status_code == 200


@pytest.mark.parametrize(
    ("flags", "replicas"),
    [
        (["--tp-size", "2", "--attn-dp-size", "2"], 2),
        (["--tp-size", "2"], 1),
        (["--dp-size", "2"], 2),
    ],
    ids=["T2A2", "T2", "D2"],
)
def test_a_layout_of_two_ranks_is_left_clean_on_both(
    model: pathlib.Path, flags: list[str], replicas: int
) -> None:
    """When it is idle, each rank checks its own books and ends the server where they do not add up."""
    with running_server(model, *FLAGS, *flags) as server:
        ranks = server.rank_pids()
        soak(server, NUM_REQUESTS_OF_A_LAYOUT)
        counts = [(now["num_requests_received"], now["num_requests_finished"]) for now in states(server)]
        assert len(counts) == replicas
        # Fewer than were sent: an abort may overtake its request, which then reaches no replica.
        assert all(received > NUM_REQUESTS_OF_A_LAYOUT // (2 * replicas) for received, _ in counts), counts
        assert all(received == finished for received, finished in counts), counts
        for replica in range(replicas):
            answer = server.generate(
                text="after all", routed_dp_rank=replica, sampling_params={"max_new_tokens": 4}
            )
            assert answer.status_code == 200
        assert server.rank_pids() == ranks
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log()

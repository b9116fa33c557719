"""Many clients at once: seeds, health, clients that hang up, and what a small pool cannot hold."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=35, suite="server-cpu")

import asyncio
import concurrent.futures
import contextlib
import json
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints.server_main import allow_many_connections
from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

CONTEXT = 32_768
#: Not over before a test has done what it wants to do meanwhile.
ENDLESS = {"temperature": 0.0, "max_new_tokens": 20_000, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
COUNTERS = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def wide(model: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(model, "--dtype", "float32", "--max-total-tokens", "60000") as server:
        yield server


@pytest.fixture(scope="module")
def narrow(model: pathlib.Path) -> Iterator[RunningServer]:
    """Two running requests at most, and prompts in chunks of 16."""
    flags = ["--max-running-requests", "2", "--chunked-prefill-size", "16", "--max-total-tokens", "60000"]
    with running_server(model, "--dtype", "float32", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A pool much smaller than the context."""
    folder = write_tiny_model(tmp_path_factory.mktemp("small"), max_position_embeddings=1024)
    with running_server(folder, "--dtype", "float32", "--max-total-tokens", "256") as server:
        yield server


def counters(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/server_info").json()["internal_states"][0]
    return found


def state(server: RunningServer) -> dict[str, Any]:
    found = counters(server)
    return {name: found[name] for name in COUNTERS}


def is_idle(server: RunningServer) -> bool:
    return not any(state(server).values())


def together(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.generate(**body), bodies))
    assert {answer.status_code for answer in answers} == {200}, [a.text[:200] for a in answers]
    return [answer.json() for answer in answers]


@contextlib.contextmanager
def client_of(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a bare connection; leaving the block hangs up."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
        yield connection


# seeds


def test_a_seed_draws_the_same_alone_in_any_company_and_in_pieces(
    wide: RunningServer, narrow: RunningServer
) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    prompt = "the quick brown fox jumps over the lazy dog and the capital of france is paris while"

    def seeded(seed: int, text: str = prompt) -> dict[str, Any]:
        return {"text": text, "sampling_params": {**params, "sampling_seed": seed}}

    alone = wide.generate(**seeded(7)).json()["output_ids"]
    assert wide.generate(**seeded(7)).json()["output_ids"] == alone, "from the cache"
    assert narrow.generate(**seeded(7)).json()["output_ids"] == alone, "in pieces"
    others = [seeded(100 + i, f"other {i} " * (i % 7 + 1)) for i in range(11)]
    for position in (0, 5, 11):
        bodies = [*others[:position], seeded(7), *others[position:]]
        assert together(wide, bodies)[position]["output_ids"] == alone, position
        batch = wide.generate(
            text=[body["text"] for body in bodies], sampling_params=[b["sampling_params"] for b in bodies]
        ).json()
        assert batch[position]["output_ids"] == alone, position
    drawn = [answer["output_ids"] for answer in together(wide, [seeded(seed) for seed in range(12)])]
    assert len({tuple(ids) for ids in drawn}) == 12, "seeds that draw alike"
    samples = wide.generate(text=prompt, sampling_params={**params, "sampling_seed": 7, "n": 4}).json()
    assert samples[0]["output_ids"] == alone
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 4
    free = {"text": prompt, "sampling_params": params}
    assert len({tuple(answer["output_ids"]) for answer in together(wide, [free] * 6)}) == 6


# health


def test_health_answers_while_a_thousand_requests_are_in_flight(wide: RunningServer) -> None:
    params = {**SHORT, "max_new_tokens": 32}
    body = json.dumps({"text": "hello", "stream": True, "sampling_params": params}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", wide.port, limit=1 << 20)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    async def crowd() -> list[bytes]:
        return await asyncio.gather(*(one() for _ in range(1000)))

    allow_many_connections()  # this process holds a thousand of them
    meanwhile = []
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=wide.url, timeout=HANG_GUARD_S) as client,
    ):
        clients = pool.submit(asyncio.run, crowd())
        while not clients.done():
            status = client.get("/health").status_code
            if not clients.done():
                meanwhile.append(status)
        answers = clients.result()
    assert all(b"data: [DONE]" in answer for answer in answers)
    assert set(meanwhile) == {200}, "no answer before the last of the crowd had left, or a wrong one"
    wait_until(lambda: is_idle(wide), lambda: str(state(wide)))


# clients that hang up

#: Requests whose client does not wait for the answer.
LEFT_ALONE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "sampling_params": ENDLESS, "stream": True}),
    ("/generate", {"text": "a", "sampling_params": ENDLESS}),
    ("/generate", {"text": "a", "sampling_params": {**ENDLESS, "n": 3}}),
    ("/generate", {"text": ["a", "b"], "sampling_params": ENDLESS, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20_000, "ignore_eos": True, "n": 2},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 20_000, "ignore_eos": True}),
]


@pytest.mark.parametrize(
    "request_left", LEFT_ALONE, ids=[f"{path}-{n}" for n, (path, _) in enumerate(LEFT_ALONE)]
)
def test_a_running_request_whose_client_hung_up_ends(
    narrow: RunningServer, request_left: tuple[str, dict[str, Any]]
) -> None:
    before = counters(narrow)["num_generated_tokens"]
    with client_of(narrow, *request_left):
        wait_until(lambda: state(narrow)["num_running_reqs"] > 0, lambda: str(state(narrow)))
    assert narrow.generate(text="next", sampling_params=SHORT).status_code == 200
    wait_until(lambda: is_idle(narrow), lambda: str(state(narrow)))
    made = counters(narrow)["num_generated_tokens"] - before
    assert made < ENDLESS["max_new_tokens"], "it ran to its end"


def test_a_waiting_request_whose_client_hung_up_leaves_the_queue(narrow: RunningServer) -> None:
    keep = {"text": "keep", "sampling_params": ENDLESS, "stream": True}
    with (
        client_of(narrow, "/generate", {**keep, "rid": "k1"}),
        client_of(narrow, "/generate", {**keep, "rid": "k2"}),
    ):
        wait_until(lambda: state(narrow)["num_running_reqs"] == 2, lambda: str(state(narrow)))
        with contextlib.ExitStack() as stack:
            for path, body in LEFT_ALONE:
                stack.enter_context(client_of(narrow, path, body))
            wait_until(lambda: state(narrow)["num_queue_reqs"] == 13, lambda: str(state(narrow)))
        wait_until(lambda: state(narrow)["num_queue_reqs"] == 0, lambda: str(state(narrow)))
        assert state(narrow)["num_running_reqs"] == 2
    wait_until(lambda: is_idle(narrow), lambda: str(state(narrow)))


def test_a_request_in_its_prompt_whose_client_hung_up_leaves(narrow: RunningServer) -> None:
    """Twenty thousand tokens in chunks of sixteen are still being computed when the client goes."""
    long_prompt = {"input_ids": [5 + i % 400 for i in range(20_000)], "sampling_params": SHORT}
    before = counters(narrow)["forward_ct_prefill"]
    with client_of(narrow, "/generate", long_prompt):
        wait_until(lambda: state(narrow)["num_used_tokens"] > 0, lambda: str(state(narrow)))
    wait_until(lambda: is_idle(narrow), lambda: str(state(narrow)))
    assert counters(narrow)["forward_ct_prefill"] - before < 20_000 // 16, "it was read to its end"


# a small pool


def test_what_the_pool_can_never_hold_is_refused_and_keeps_nobody_waiting(small: RunningServer) -> None:
    refusals = [
        ({"input_ids": [7] * 300, "sampling_params": SHORT}, "300"),
        ({"input_ids": [7] * 200, "sampling_params": {**SHORT, "max_new_tokens": 200}}, "400"),
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs = []
        for body, number in refusals * 3:
            jobs.append((pool.submit(small.generate, **body), number))
            jobs.append((pool.submit(small.generate, text="small", sampling_params=SHORT), None))
        for job, number in jobs:
            answer = job.result(HANG_GUARD_S)
            if number is None:
                assert answer.json()["meta_info"]["completion_tokens"] == 8
            else:
                assert answer.status_code == 400
                assert number in answer.json()["message"]
                assert "256" in answer.json()["message"]
    wait_until(lambda: is_idle(small), lambda: str(state(small)))


def test_without_a_limit_of_its_own_a_long_prompt_ends_at_the_end_of_the_pool(small: RunningServer) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": None}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        long = pool.submit(small.generate, input_ids=[7] * 200, sampling_params=params)
        behind = pool.submit(small.generate, text="small", sampling_params=SHORT)
        meta = long.result(HANG_GUARD_S).json()["meta_info"]
        assert behind.result(HANG_GUARD_S).status_code == 200
    assert meta["finish_reason"]["type"] == "length"
    assert 200 + meta["completion_tokens"] <= 256


def test_requests_that_fit_alone_and_not_together_all_end_as_they_would_alone(small: RunningServer) -> None:
    bodies = [
        {"input_ids": [10 + i] * 60, "sampling_params": {**SHORT, "max_new_tokens": 100}} for i in range(6)
    ]
    alone = [small.generate(**body).json()["output_ids"] for body in bodies]
    assert [answer["output_ids"] for answer in together(small, bodies)] == alone
    wait_until(lambda: is_idle(small), lambda: str(state(small)))

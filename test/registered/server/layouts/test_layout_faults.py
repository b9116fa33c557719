"""What ends a server of several ranks: a rank killed, stopped or failing in mid-step, a port in use.

Whatever happens, clients get an error, the log names the first cause, and nothing is left behind.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=70, suite="server-cpu")

import os
import pathlib
import signal
from typing import Any

import httpx
import pytest

from sglang.test.fakes.fake_failing_rank import FAKE_FAILING_RANK, LEAKING_TOKEN, RAISING_TOKEN
from sglang.test.ports import held_ports, listen_on, port_is_free
from sglang.test.server.server_fixture import (
    RunningServer,
    StreamingClient,
    process_is_gone,
    running_server,
    serve_to_the_end,
)
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

SMALL = ("--max-total-tokens", "40000", "--dtype", "float32")
#: Most faults are seen at once: a test that waited for this limit would have failed long before.
PATIENT = ("--dist-timeout", "3600")
#: Long enough for a busy machine, short enough for a test that waits for it.
IMPATIENT = ("--dist-timeout", "6")
LAYOUTS = pytest.mark.parametrize(
    "flags", [["--tp-size", "2"], ["--tp-size", "2", "--attn-dp-size", "2"]], ids=["T2", "T2A2"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


def open_stream(server: RunningServer, **body: Any) -> StreamingClient:
    """A client in the middle of an answer that takes minutes."""
    sampling = {"max_new_tokens": 30_000, "ignore_eos": True}
    client = StreamingClient(server, **{"input_ids": [5, 6, 7], "sampling_params": sampling, **body})
    client.wait_for_events(3)
    return client


def assert_ended_with(
    server: RunningServer, ranks: list[int], stream: StreamingClient | None, cause: str
) -> None:
    assert server.wait_exit() == 1
    if stream is not None:
        stream.join(HANG_GUARD_S)
        assert not stream.is_alive(), "the client hangs"
        assert cause in stream.lines[-2], stream.lines[-2:]
    deaths = [line for line in server.log().splitlines() if "a scheduler process has died" in line]
    assert len(deaths) == 1 and cause in deaths[0], server.log()
    wait_until(lambda: all(map(process_is_gone, ranks)))
    assert server.leftovers() == []
    assert port_is_free(server.port)


@LAYOUTS
def test_a_killed_rank_is_the_cause_and_not_the_connection_to_it(
    model: pathlib.Path, flags: list[str]
) -> None:
    with running_server(model, *SMALL, *PATIENT, *flags) as server:
        ranks = server.rank_pids()
        stream = open_stream(server, routed_dp_rank=0)
        os.kill(ranks[1], signal.SIGKILL)
        assert_ended_with(server, ranks, stream, f"rank 1 (pid {ranks[1]}) was killed by signal 9 (SIGKILL)")


@LAYOUTS
def test_a_stopped_rank_is_an_error_within_the_timeout(model: pathlib.Path, flags: list[str]) -> None:
    """Its peers would sit in a collective for as long as its limit allows, with health still green."""
    with running_server(model, *SMALL, *IMPATIENT, *flags) as server:
        ranks = server.rank_pids()
        stream = open_stream(server, routed_dp_rank=0)
        os.kill(ranks[1], signal.SIGSTOP)
        health: list[int] = []

        def unhealthy() -> bool:
            try:
                health.append(server.client.get("/health").status_code)
            except httpx.HTTPError:
                return True
            return health[-1] == 503

        wait_until(unhealthy, server.log)
        assert_ended_with(server, ranks, stream, f"rank 1 (pid {ranks[1]}) is stopped by a signal")
        assert "--dist-timeout" in server.log()


@LAYOUTS
def test_a_rank_that_raises_in_its_step_is_the_cause(model: pathlib.Path, flags: list[str]) -> None:
    """Its peers see a lost connection a moment later, or wait for it; the cause must be the exception."""
    with running_server(model, *SMALL, *PATIENT, *flags, rank_module=FAKE_FAILING_RANK) as server:
        ranks = server.rank_pids()
        stream = open_stream(server, routed_dp_rank=0)
        replica = 1 if "--attn-dp-size" in flags else 0
        failed = server.generate(input_ids=[5, RAISING_TOKEN, 6], routed_dp_rank=replica)
        assert failed.status_code == 500
        cause = "RuntimeError: this rank was told to fail in its step"
        assert cause in failed.json()["error"]["message"]
        assert_ended_with(server, ranks, stream, f"rank 1 (pid {ranks[1]}): {cause}")


@LAYOUTS
def test_a_slot_lost_on_one_rank_ends_the_server_when_its_replica_is_idle(
    model: pathlib.Path, flags: list[str]
) -> None:
    """Each rank checks its own sums, also a peer, which sends no answers."""
    with running_server(model, *SMALL, *PATIENT, *flags, rank_module=FAKE_FAILING_RANK) as server:
        ranks = server.rank_pids()
        replicas = "--attn-dp-size" in flags
        stream = open_stream(server, routed_dp_rank=0) if replicas else None
        answer = server.generate(
            input_ids=[5, LEAKING_TOKEN, 6],
            routed_dp_rank=int(replicas),
            sampling_params={"max_new_tokens": 1},
        )
        cause = "RuntimeError: the KV pool does not add up: free "
        # The forward went well: a leader's answer and a peer's complaint leave in the same moment.
        assert answer.status_code == 200 or cause in answer.json()["error"]["message"], answer.text
        assert_ended_with(server, ranks, stream, f"rank 1 (pid {ranks[1]}): {cause}")


def test_a_stop_while_a_rank_is_held_ends_all_the_same(model: pathlib.Path) -> None:
    with running_server(model, *SMALL, *PATIENT, "--tp-size", "2") as server:
        ranks = server.rank_pids()
        os.kill(ranks[0], signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        server.wait_exit()
        wait_until(lambda: all(map(process_is_gone, ranks)))
        assert server.leftovers() == []


def test_a_port_of_a_replica_in_use_is_said_before_anything_starts(model: pathlib.Path) -> None:
    with held_ports(2) as first, listen_on(first + 1):
        flags = ["--nnodes", "1", "--node-rank", "0", "--dist-init-addr", f"127.0.0.1:{first}"]
        done = serve_to_the_end("--model-path", str(model), "--port", "0", "--dp-size", "2", *flags)
    assert done.returncode == 1
    assert f"cannot meet at 127.0.0.1:{first + 1}: the port is in use" in done.stderr
    assert "(replica 1 of --dp-size meets there)" in done.stderr
    assert "server_args=" not in done.stderr, "something was started"
    assert "Traceback" not in done.stderr

"""The life of a server: deaths, drains, signals, and that nothing is left behind.

Ranks are fake where the model does not matter.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import os
import pathlib
import signal
import socket
import tempfile

import pytest

from sglang.test.fakes.fake_rank import EXIT_PROMPT, HANG_PROMPT, RAISE_PROMPT
from sglang.test.ports import port_is_free
from sglang.test.server.server_fixture import (
    RunningServer,
    StreamingClient,
    process_is_gone,
    running_server,
    serve_to_the_end,
)
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

#: A few seconds of a fake rank.
LONG = {"max_new_tokens": 400, "ignore_eos": True}
#: Longer than any wait: a test that waited for its end would fail.
ENDLESS = {"max_new_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


def assert_nothing_is_left(server: RunningServer, ranks: list[int]) -> None:
    wait_until(lambda: all(map(process_is_gone, ranks)))
    wait_until(lambda: server.leftovers() == [], lambda: str(server.leftovers()))
    assert port_is_free(server.port)


def test_killing_the_rank_ends_the_server_with_its_cause(model: pathlib.Path) -> None:
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        stream = StreamingClient(server, text="hello", sampling_params=ENDLESS)
        stream.wait_for_events()
        os.kill(ranks[0], signal.SIGKILL)
        assert server.wait_exit() == 1
        stream.join(HANG_GUARD_S)
        assert not stream.is_alive(), "the client hangs"
        assert "SIGKILL" in stream.lines[-2]
        assert stream.lines[-1] == "data: [DONE]"
        assert f"rank 0 (pid {ranks[0]}) was killed by signal 9 (SIGKILL)" in server.log()
        assert_nothing_is_left(server, ranks)


def test_killing_the_main_process_takes_the_ranks_along(model: pathlib.Path) -> None:
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        assert ranks
        server.signal(signal.SIGKILL)
        server.wait_exit()
        assert_nothing_is_left(server, ranks)


def test_the_real_rank_leaves_with_a_killed_main_process_too(model: pathlib.Path) -> None:
    with running_server(model, "--max-total-tokens", "40000") as server:
        ranks = server.rank_pids()
        StreamingClient(server, text="hello", sampling_params=ENDLESS).wait_for_events()
        server.signal(signal.SIGKILL)
        server.wait_exit()
        assert_nothing_is_left(server, ranks)


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (RAISE_PROMPT, "RuntimeError: the fake loop was told to fail"),
        (EXIT_PROMPT, "scheduler died (exit code: 3)"),
    ],
)
def test_a_rank_that_ends_by_itself_ends_the_server_with_its_cause(
    model: pathlib.Path, prompt: list[int], cause: str
) -> None:
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        answer = server.generate(input_ids=prompt)
        assert answer.status_code == 500
        assert cause in answer.json()["error"]["message"]
        assert server.wait_exit() == 1
        assert cause in server.log()
        assert_nothing_is_left(server, ranks)


def test_a_stuck_rank_is_ended_by_the_watchdog_with_its_stacks(model: pathlib.Path) -> None:
    with running_server(model, "--watchdog-timeout", "1", fake=True) as server:
        ranks = server.rank_pids()
        answer = server.generate(input_ids=HANG_PROMPT)
        assert answer.status_code == 500
        assert server.wait_exit() == 1
        assert "watchdog timeout: rank 0" in server.log()
        assert "_fail_on_purpose" in server.log(), "no stacks in the log"
        assert_nothing_is_left(server, ranks)


def test_sigterm_lets_streams_finish_and_takes_nothing_new(model: pathlib.Path) -> None:
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        streams = [StreamingClient(server, text="hello", sampling_params=LONG) for _ in range(10)]
        for stream in streams:
            stream.wait_for_events()
        # Held, so that no stream can be over before the test has looked.
        os.kill(ranks[0], signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/health").status_code == 503)
        refused = server.generate(text="new")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert all(stream.is_alive() for stream in streams)
        os.kill(ranks[0], signal.SIGCONT)
        assert server.wait_exit() == 0
        for stream in streams:
            stream.join(HANG_GUARD_S)
            assert stream.error is None
            assert stream.lines[-1] == "data: [DONE]"
            assert '"completion_tokens":400' in stream.lines[-2]
        assert "SIGTERM received" in server.log()
        assert "Gracefully exiting... Remaining number of requests" in server.log()
        assert_nothing_is_left(server, ranks)


def test_a_second_sigterm_ends_at_once(model: pathlib.Path) -> None:
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        StreamingClient(server, text="hello", sampling_params=ENDLESS).wait_for_events()
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/health").status_code == 503)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert_nothing_is_left(server, ranks)


def test_the_force_variable_skips_the_drain(model: pathlib.Path) -> None:
    with running_server(model, fake=True, SGLANG_FORCE_SHUTDOWN="1") as server:
        ranks = server.rank_pids()
        StreamingClient(server, text="hello", sampling_params=ENDLESS).wait_for_events()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert_nothing_is_left(server, ranks)


def test_sigint_stops_cleanly_also_when_it_reaches_the_ranks(model: pathlib.Path) -> None:
    """Ctrl-C in a terminal goes to the whole process group."""
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        for pid in ranks:
            os.kill(pid, signal.SIGINT)
        assert server.generate(text="still here").status_code == 200
        server.signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log()
        assert_nothing_is_left(server, ranks)


def test_a_port_in_use_is_said_before_anything_is_loaded(model: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve_to_the_end("--model-path", str(model), "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "server_args=" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--tp-size", "0"], 1, "tp"),
        (["--enable-lora"], 1, "--enable-lora"),
        (["--model-path", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    model: pathlib.Path, flags: list[str], code: int, text: str
) -> None:
    done = serve_to_the_end("--model-path", str(model), *flags)
    assert (done.returncode in (1, 2)) if code == 1 else done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_cannot_load_ends_the_start_with_its_cause(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with running_server(broken, wait=False) as server:
        assert server.wait_exit() == 1
        assert "model.safetensors" in server.log()
        assert "a scheduler process has died: rank 0" in server.log()
        assert server.leftovers() == []


def test_the_next_start_sweeps_what_a_killed_family_left(model: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sgl-sweep-") as name:
        folder = pathlib.Path(name)
        with running_server(model, fake=True, folder=folder) as server:
            # All at once, so that no survivor can tidy up.
            for pid in server.rank_pids():
                os.kill(pid, signal.SIGSTOP)
            ranks = server.rank_pids()
            server.signal(signal.SIGKILL)
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            server.wait_exit()
            assert len(server.leftovers()) == 1
        with running_server(model, fake=True, folder=folder) as server:
            assert len(server.leftovers()) == 1, "the dead folder is still there beside the new one"
            other = server.leftovers()
            with running_server(model, fake=True, folder=folder) as second:
                assert len(second.leftovers()) == 2, "a folder in use was swept"
                assert other[0] in second.leftovers()


def test_sigterm_during_the_start_ends_it_cleanly(model: pathlib.Path) -> None:
    with running_server(model, wait=False) as server:
        wait_until(lambda: server.rank_pids(), server.log)
        wait_until(lambda: "Started server process" in server.log(), server.log)
        ranks = server.rank_pids()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log()
        assert_nothing_is_left(server, ranks)

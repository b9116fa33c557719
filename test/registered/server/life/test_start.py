"""A start never ends or hangs without a logged reason: early signals, early deaths, a broken HTTP side."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from sglang.srt.environ import child_environment
from sglang.test.server.server_fixture import READY_LINE, RunningServer, process_is_gone, running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

#: The server over fake ranks, with one of its functions replaced by `{bend}`.
SCRIPT = """
import os, signal, sys, time
from sglang.srt.entrypoints import engine_core, server_main
from sglang.srt.server_args import prepare_server_args
from sglang.test.fakes.fake_rank import FAKE_RANK
rank = FAKE_RANK
{bend}
sys.exit(server_main.run_server(prepare_server_args(sys.argv[1:]), rank_module=rank))
"""

SIGNAL_AT = """
before = {target}
def bent(*args, **kwargs):
    os.kill(os.getpid(), signal.{name})
    return before(*args, **kwargs)
{target} = bent
"""

DEATH_BEFORE_THE_LOOP = """
rank = "sglang.test.no_such_module"
before = engine_core.EngineCore.notify_death
def bent(core, callback):
    before(core, callback)
    while core.ranks.cause is None:
        time.sleep(0.01)
engine_core.EngineCore.notify_death = bent
"""

HTTP_ENDS = """
from sglang.srt.entrypoints import http_server
async def bent(http):
    {how}
http_server.HttpServer.run_until_stopped = bent
"""


def bent_start(
    model: pathlib.Path, tmp_path: pathlib.Path, bend: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    run = tmp_path / "run"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(bend=bend), "--model-path", str(model), "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        env={**child_environment(OMP_NUM_THREADS="1"), "SGLANG_RUNTIME_DIR": str(run)},
    )
    assert list(run.iterdir()) == [], "a socket folder is left"
    return done


def test_a_port_that_the_system_chose_is_shown(model: pathlib.Path) -> None:
    """`/server_info` must not show 0, to which no client can connect."""
    with running_server(model, "--port", "0", fake=True) as server:
        found = re.search(r"curl http://127\.0\.0\.1:(\d+)/", server.log())
        assert found is not None, server.log()
        port = int(found[1])
        info = httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=30).json()
    assert info["port"] == port != 0


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("SIGTERM", "server_main.listen"),
        ("SIGTERM", "engine_core.RankProcesses"),
        ("SIGTERM", "server_main.AccessPolicy"),
        ("SIGINT", "engine_core.RankProcesses"),
        ("SIGHUP", "engine_core.RankProcesses"),
        ("SIGHUP", "server_main.AccessPolicy"),
    ],
)
def test_a_signal_before_the_loop_runs_ends_the_start_in_order(
    model: pathlib.Path, tmp_path: pathlib.Path, name: str, target: str
) -> None:
    done = bent_start(model, tmp_path, SIGNAL_AT.format(target=target, name=name))
    assert done.returncode == 0, done.stderr
    assert f"{name} received" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_that_the_caller_ignores_stays_ignored(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`nohup` starts its command with SIGHUP ignored."""
    bend = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SIGNAL_AT.format(
        target="server_main.listen", name="SIGHUP"
    )
    bend += (
        SIGNAL_AT.replace("before", "other")
        .replace("bent", "bent2")
        .format(target="server_main.AccessPolicy", name="SIGTERM")
    )
    done = bent_start(model, tmp_path, bend)
    assert done.returncode == 0
    assert "SIGTERM received" in done.stderr
    assert "SIGHUP received" not in done.stderr


def test_a_rank_that_dies_at_once_ends_the_start_with_its_cause(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = bent_start(model, tmp_path, DEATH_BEFORE_THE_LOOP)
    assert done.returncode == 1
    assert "a scheduler process has died: rank 0" in done.stderr
    assert "no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("how", "word"),
    [("raise OSError('no door')", "the HTTP server failed: OSError: no door"), ("return", "ended by itself")],
)
def test_a_server_without_its_http_side_does_not_go_on(
    model: pathlib.Path, tmp_path: pathlib.Path, how: str, word: str
) -> None:
    done = bent_start(model, tmp_path, HTTP_ENDS.format(how=how))
    assert done.returncode == 1
    assert word in done.stderr


def test_a_broken_certificate_ends_the_start_with_a_sentence(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    done = bent_start(model, tmp_path, "", "--ssl-keyfile", str(broken), "--ssl-certfile", str(broken))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --ssl-certfile {broken} and --ssl-keyfile {broken} cannot be used")


def test_a_refusal_of_the_system_is_a_sentence_with_the_cure(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bend = """
import errno
def bent(*args, **kwargs):
    raise OSError(errno.EMFILE, "Too many open files")
engine_core.RankProcesses = bent
"""
    done = bent_start(model, tmp_path, bend)
    assert done.returncode == 1
    assert "error: [Errno 24] Too many open files: this process may not open more" in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_that_cannot_be_read_end_the_start_with_their_sentence_alone(tmp_path: pathlib.Path) -> None:
    """The sentence must not be hidden between tracebacks of the rank."""
    broken = write_tiny_model(tmp_path / "model")
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(b"")
    with running_server(broken, wait=False) as server:
        assert server.wait_exit() == 1
        assert f"{weights} is truncated or no safetensors file" in server.log()
        assert "Traceback" not in server.log()


def test_a_signal_while_the_program_is_imported_ends_the_start_in_order(model: pathlib.Path) -> None:
    """Ctrl-C during the first imports must not be a traceback."""
    code = """
import os, signal, sys
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.entrypoints.server_main":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Early())
from sglang.srt.entrypoints.process_start import serve
from sglang.test.fakes.fake_rank import FAKE_RANK
sys.exit(serve(sys.argv[1:], rank_module=FAKE_RANK))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--model-path", str(model), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    assert "SIGINT received" in done.stderr and "Traceback" not in done.stderr


def answers(server: RunningServer) -> bool:
    try:
        return server.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("closed", ["2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>/dev/full"])
def test_a_server_runs_though_its_standard_streams_are_closed(model: pathlib.Path, closed: str) -> None:
    """Output that cannot be written must not end it."""
    with running_server(
        model, fake=True, wait=False, wrapper=["bash", "-c", f'exec "$@" {closed}', "_"]
    ) as server:
        wait_until(lambda: answers(server), server.log)
        assert server.generate(text="hello", sampling_params={"max_new_tokens": 1}).status_code == 200
        assert (READY_LINE in server.log()) == (closed == "2>&-"), "the log goes where something is open"
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0, "what could not be written must not be an error in the end"


def test_an_engine_runs_though_standard_error_is_closed(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, sglang as sgl\n"
        "from sglang.test.fakes.fake_rank import FAKE_RANK\n"
        "with sgl.Engine(model_path=sys.argv[1], _rank_module=FAKE_RANK) as engine:\n"
        "    print(len(engine.generate('hi', {'max_new_tokens': 3})['output_ids']))\n"
    )
    code = ["bash", "-c", 'exec "$@" 2>&-', "_", sys.executable, str(script), str(model)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, env=child_environment())
    assert (done.returncode, done.stdout) == (0, "3\n")


def test_a_server_runs_though_its_working_folder_is_gone(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Importing torch asks for the working folder, and would end the rank with a misleading error."""
    gone = tmp_path / "gone"
    gone.mkdir()
    with running_server(
        model, wrapper=["bash", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "_"]
    ) as server:
        assert "the working folder has been deleted" in server.log()
        assert server.generate(text="hello", sampling_params={"max_new_tokens": 1}).status_code == 200


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_the_command_to_paste_reaches_a_server_on_an_ipv6_address(model: pathlib.Path, host: str) -> None:
    """Without brackets curl takes the last group of the address for the port."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with running_server(model, "--host", host, fake=True) as server:
        (url,) = re.findall(r"^  curl (\S+) ", server.log(), re.MULTILINE)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert url == f"http://[::1]:{server.port}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200


def test_a_small_pool_refuses_no_limit_that_nobody_named(model: pathlib.Path) -> None:
    with running_server(model, "--max-total-tokens", "64", fake=True) as server:

        def ask(length: int) -> httpx.Response:
            return server.client.post("/v1/completions", json={"prompt": [20] * length})

        assert ask(60).json()["usage"]["completion_tokens"] == 4
        message = ask(64).json()["error"]["message"]
        assert "The input (64 tokens) does not fit into the KV cache pool (64 tokens)" in message
        assert "max_tokens" not in message


def test_a_wrong_runtime_folder_is_a_sentence(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with running_server(model, fake=True, wait=False, SGLANG_RUNTIME_DIR=str(tmp_path / "none")) as server:
        assert server.wait_exit() == 1
        assert "error: SGLANG_RUNTIME_DIR" in server.log()
        assert "Traceback" not in server.log()


def test_the_rank_says_it_when_its_server_was_killed(model: pathlib.Path) -> None:
    """Otherwise the log just ends, and does not show which process ended first."""
    with running_server(model, fake=True) as server:
        ranks = server.rank_pids()
        server.signal(signal.SIGKILL)
        server.wait_exit()
        wait_until(lambda: all(map(process_is_gone, ranks)))
        assert (
            f"rank 0 leaves: the process that started it (pid {server.process.pid}) is gone" in server.log()
        )


def test_an_ordered_end_has_no_such_line(model: pathlib.Path) -> None:
    with running_server(model, fake=True, wait=False) as server:
        wait_until(lambda: server.rank_pids())
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "rank 0 leaves" not in server.log()


def test_a_low_limit_on_open_files_is_raised_as_far_as_allowed(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bend = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 700))
before = server_main.listen
def bent(*args):
    print(resource.getrlimit(resource.RLIMIT_NOFILE), file=sys.stderr)
    sys.exit(0)
server_main.listen = bent
"""
    assert "(700, 700)" in bent_start(model, tmp_path, bend).stderr


def test_a_server_can_be_asked_for_its_stacks(model: pathlib.Path) -> None:
    with running_server(model, fake=True) as server:
        os.kill(server.process.pid, signal.SIGUSR1)
        wait_until(lambda: "most recent call first" in server.log())
        assert server.generate(text="still here").status_code == 200

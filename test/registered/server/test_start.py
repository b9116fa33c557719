"""A start never ends or hangs without a word: early signals, a rank that dies at once, a door that breaks."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=35, suite="server-cpu")

import os
import pathlib
import re
import signal
import subprocess
import sys

import httpx
import pytest

from sglang.srt.environ import child_environment
from sglang.test.server_fixture import process_is_gone, running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

#: The server over fake ranks, with one of its moments bent by `{bend}`.
SCRIPT = """
import os, signal, sys, time
from sglang.srt.entrypoints import engine_core, server_main
from sglang.srt.server_args import prepare_server_args
from sglang.test.fake_rank import FAKE_RANK
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
http_server.HttpServer.run_until_told = bent
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


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
    """`/server_info` said 0, which nobody can connect to."""
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
    assert "the HTTP server failed: SSLError" in done.stderr


def test_a_wrong_runtime_folder_is_a_sentence(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with running_server(model, fake=True, wait=False, SGLANG_RUNTIME_DIR=str(tmp_path / "none")) as server:
        assert server.wait_exit() == 1
        assert "error: SGLANG_RUNTIME_DIR" in server.log()
        assert "Traceback" not in server.log()


def test_the_rank_says_it_when_its_server_was_killed(model: pathlib.Path) -> None:
    """Otherwise the log just ends, and nobody knows at which end to look."""
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

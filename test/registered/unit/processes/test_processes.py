"""What a process of the engine stands on: socket folders, wires, rank processes, heartbeats, log lines."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=18, suite="unit-cpu")

import asyncio
import contextlib
import gc
import logging
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.messages import io_struct
from sglang.srt.processes import rank_environment, rank_processes, rank_watch
from sglang.srt.processes.cpu_binding import bind_to, cores_of_rank, parse_core_lists
from sglang.srt.processes.heartbeat import Heartbeat, HeartbeatReader
from sglang.srt.processes.hold_watch import HoldWatch, process_state
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.rank_processes import RankDied, RankProcesses
from sglang.srt.processes.sockets import SocketFolder, sweep_dead_folders
from sglang.srt.processes.wire import RankChannel, ServerChannel
from sglang.srt.utils.log_format import LineFormatter, configure_logging, rank_suffix
from sglang.test.waiting import HANG_GUARD_S, wait_until


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[SocketFolder]:
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        folder = SocketFolder()
        yield folder
        folder.remove()


# folders


def test_a_folder_is_private_named_by_pid_and_goes_away(folder: SocketFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert f"-{os.getpid()}-" in folder.path.name
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_a_sweep_takes_dead_folders_and_leaves_living_and_strange_ones(folder: SocketFolder) -> None:
    root = folder.path.parent
    code = "from sglang.srt.processes.sockets import SocketFolder; print(SocketFolder().path)"
    dead = pathlib.Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    )
    assert dead.is_dir()
    (root / "sglang-notes").mkdir()
    assert sweep_dead_folders(root) == [dead]
    assert folder.path.is_dir()
    assert (root / "sglang-notes").is_dir()


def test_a_path_that_no_socket_can_have_is_refused_with_the_cure(tmp_path: pathlib.Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with envs.SGLANG_RUNTIME_DIR.override(str(deep)):
        folder = SocketFolder()
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(folder.remove)
            with pytest.raises(ValueError, match="SGLANG_RUNTIME_DIR"):
                _ = folder.server_address


def test_a_folder_that_no_message_can_name_is_refused_with_its_variable(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is nobody's flag: without this its bytes fail in the middle of the start."""
    torn = tmp_path / "caf\udce9"
    torn.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(torn))
    with envs.SGLANG_RUNTIME_DIR.override(None), pytest.raises(ValueError, match=r"TMPDIR.*caf\\xe9 is not"):
        SocketFolder()


def test_a_folder_that_cannot_be_made_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        envs.SGLANG_RUNTIME_DIR.override("/proc/self"),
        pytest.raises(
            ValueError, match=r"sockets can be made in /proc/self \(.*\); set SGLANG_RUNTIME_DIR to"
        ),
    ):
        SocketFolder()

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.delenv("SGLANG_RUNTIME_DIR", raising=False)
    with pytest.raises(ValueError, match=r"no folder for sockets \(No usable.*\); set SGLANG_RUNTIME_DIR to"):
        SocketFolder()


# wires


def test_messages_cross_in_order_in_both_directions(folder: SocketFolder) -> None:
    async def main() -> None:
        rank = RankChannel(listen=folder.rank_address(0), server=folder.server_address)
        server = ServerChannel(folder)
        assert rank.recv_all() == []
        assert rank.wait(0.01) is False
        for number in range(50):
            server.send(io_struct.GetInternalStateReq(call_id=number))
        seen: list[Any] = []
        while len(seen) < 50:
            assert await asyncio.to_thread(rank.wait, HANG_GUARD_S)
            seen += rank.recv_all()
        assert [message.call_id for message in seen] == list(range(50))
        for number in range(50):
            rank.send(io_struct.FlushCacheReqOutput(call_id=number, success=True))
        assert [(await server.recv()).call_id for _ in range(50)] == list(range(50))  # type: ignore[union-attr]
        rank.close()
        server.close()

    asyncio.run(main())


def test_sending_to_a_rank_that_is_gone_does_not_block(folder: SocketFolder) -> None:
    async def main() -> None:
        server = ServerChannel(folder)
        for number in range(5000):
            server.send(io_struct.GetInternalStateReq(call_id=number))
        server.close(linger_ms=0)

    asyncio.run(main())


# ranks

#: Two ranks may wait for each other: one leaves its pid in the folder, the other looks at its state.
RANK_HEAD = """\
import os, pathlib, sys, time
from sglang.srt.processes.rank_life import RankLife
from sglang.srt.messages import io_struct
from sglang.srt.processes.hold_watch import process_state
from sglang.test.waiting import wait_until
life, config = RankLife.begin(sys.argv)
mark = pathlib.Path(config.folder, "mark")

def leave_mark():
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)

def await_state(*states):
    wait_until(lambda: mark.exists() and process_state(int(mark.read_text())) in states)
"""


@pytest.fixture
def rank_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write the body of a rank; it is importable as `small_rank` in the child."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(body: str) -> str:
        (tmp_path / "small_rank.py").write_text(RANK_HEAD + textwrap.dedent(body))
        return "small_rank"

    yield write


@contextlib.contextmanager
def started(
    folder: SocketFolder, module: str, count: int = 1, on_left: Any = None
) -> Iterator[tuple[RankProcesses, list[str]]]:
    deaths: list[str] = []
    configs = [
        RankConfig(
            configuration=b"x" * 200_000,  # more than a pipe holds: the parent must not wait for ever
            world_rank=rank,
            world_size=count,
            local_rank=rank,
            ranks_on_host=count,
            rendezvous="tcp://127.0.0.1:1",
            folder=str(folder.path),
            listen=folder.rank_address(rank),
            server=folder.server_address,
            heartbeat=str(folder.heartbeat_path(rank)),
            parent_pid=os.getpid(),
        )
        for rank in range(count)
    ]
    ranks = RankProcesses(configs, on_death=deaths.append, on_left=on_left, module=module)
    try:
        yield ranks, deaths
    finally:
        ranks.stop(grace_s=0.0)


READY = (
    "life.send(io_struct.RankReady(world_rank=config.world_rank, info={'size': len(config.configuration)}))\n"
)


def test_ranks_report_ready_and_leave_when_their_pipe_ends(folder: SocketFolder, rank_module: Any) -> None:
    with started(folder, rank_module(READY + "time.sleep(60)"), count=2) as (ranks, deaths):
        ready = ranks.wait_ready()
        assert [(message.world_rank, message.info) for message in ready] == [
            (0, {"size": 200_000}),
            (1, {"size": 200_000}),
        ]
        pids = ranks.pids
        assert len(set(pids)) == 2
    assert deaths == [], "an ordered end is no death"
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("life.send_failure(0, ValueError('no such weight'))", "ValueError: no such weight"),
        ("sys.exit(4)", "scheduler died during initialization (exit code: 4)"),
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL) during initialization"),
        ("import no_such_thing", "exit code: 1"),
    ],
)
def test_a_start_that_fails_says_why(folder: SocketFolder, rank_module: Any, body: str, cause: str) -> None:
    with started(folder, rank_module(body)) as (ranks, deaths):
        with pytest.raises(RankDied) as caught:
            ranks.wait_ready()
        assert cause in str(caught.value)
        wait_until(lambda: deaths)
        assert deaths == [str(caught.value)]


COMPLAINT = "life.send_failure(0, ConnectionError('peer lost'), secondary=True)\nsys.exit(1)\n"


@pytest.mark.parametrize(
    ("last_words", "cause"),
    [
        ("life.send_failure(1, MemoryError('full'))\nsys.exit(1)", "MemoryError: full"),
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)"),
        ("sys.exit(5)", "scheduler died (exit code: 5)"),
    ],
)
def test_the_first_cause_is_told_and_not_the_complaint_of_a_peer(
    folder: SocketFolder, rank_module: Any, monkeypatch: pytest.MonkeyPatch, last_words: str, cause: str
) -> None:
    """When one rank dies its peers notice first; their complaint must not hide the reason."""
    monkeypatch.setattr(rank_watch, "PRIMARY_CAUSE_WAIT_S", HANG_GUARD_S)
    complains = READY + "if config.world_rank == 0:\n" + textwrap.indent("leave_mark()\n" + COMPLAINT, "  ")
    # Rank 1 has its word when the one that complained of it is gone.
    body = complains + "await_state('', 'Z')\n" + last_words
    with started(folder, rank_module(body), count=2) as (ranks, deaths):
        wait_until(lambda: deaths)
        assert len(deaths) == 1
        assert deaths[0].startswith(f"rank 1 (pid {ranks.pids[1]})")
        assert cause in deaths[0]


@pytest.mark.parametrize(
    ("silence", "state", "words"),
    [
        ("os.kill(os.getpid(), 19)", "T", "is stopped by a signal (SIGSTOP or a debugger)"),
        ("time.sleep(60)", "S", "did not answer its peers"),
    ],
)
def test_a_rank_that_keeps_silent_is_named_when_its_peers_give_up(
    folder: SocketFolder,
    rank_module: Any,
    monkeypatch: pytest.MonkeyPatch,
    silence: str,
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr(rank_watch, "PRIMARY_CAUSE_WAIT_S", 0.2)
    monkeypatch.setattr(rank_watch, "_DUMP_GRACE_S", 0.1)
    monkeypatch.setattr(rank_processes, "_EOF_GRACE_S", 0.2)
    keeps_silent = READY + f"if config.world_rank == 1:\n  leave_mark()\n  {silence}\n"
    # Rank 0 complains when the other one has fallen silent.
    body = keeps_silent + f"await_state({state!r})\n" + COMPLAINT
    with started(folder, rank_module(body), count=2) as (ranks, deaths):
        wait_until(lambda: deaths)
        assert deaths[0].startswith(f"rank 1 (pid {ranks.pids[1]}) {words}; rank 0 (pid {ranks.pids[0]})")
        assert "ConnectionError: peer lost" in deaths[0]


@pytest.mark.parametrize("head", ["", READY], ids=["starting", "ready"])
def test_a_rank_that_stays_stopped_is_dead_though_no_peer_complains(
    folder: SocketFolder, rank_module: Any, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """It may have no peer on this machine: requests would wait for as long as the watchdog allows."""
    monkeypatch.setattr(rank_processes, "DIST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rank_processes, "_EOF_GRACE_S", 0.2)
    with started(folder, rank_module(head + "os.kill(os.getpid(), 19)")) as (ranks, deaths):
        wait_until(lambda: deaths)
        (pid,) = ranks.pids
        assert deaths[0].startswith(
            f"rank 0 (pid {pid}) is stopped by a signal (SIGSTOP) and has not gone on"
        )
        assert "--dist-timeout" in deaths[0]


def test_time_in_which_the_watcher_could_not_run_counts_against_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([100.0, 101.0, 102.0, 402.0, 403.0, 403.5])
    monkeypatch.setattr(
        "sglang.srt.processes.hold_watch.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    monkeypatch.setattr("sglang.srt.processes.hold_watch.process_state", {1: "T", 2: "t", 3: "S"}.get)
    watch = HoldWatch(60.0)
    seen = []
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            watch.tick()
            seen.append(watch.held([1, 2, 3]))
    assert seen == [{1: 0.0}, {1: 1.0}, {1: 3.0}, {1: 4.0}]
    assert watch.awake_s == 1.5
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "this process could not run for 300 s"
    ]


def test_a_complaint_that_nobody_explains_is_told(
    folder: SocketFolder, rank_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "PRIMARY_CAUSE_WAIT_S", 0.2)
    body = READY + "life.send_failure(config.world_rank, ConnectionError('peer lost'), secondary=True)"
    with started(folder, rank_module(body), count=2) as (_, deaths):
        wait_until(lambda: deaths)
        assert "ConnectionError: peer lost" in deaths[0]


def test_ranks_that_follow_another_machine_may_leave_when_told(
    folder: SocketFolder, rank_module: Any
) -> None:
    left: list[bool] = []
    last = folder.path / "last"
    # Rank 1 goes when rank 0 is gone.
    body = READY + "if config.world_rank == 0:\n  leave_mark()\n  sys.exit(0)\nawait_state('', 'Z')\n"
    body += "pathlib.Path(config.folder, 'last').touch()"
    with started(folder, rank_module(body), count=2, on_left=lambda: left.append(last.exists())) as (
        _,
        deaths,
    ):
        wait_until(lambda: left)
        assert (left, deaths) == ([True], []), "told before the last of them had left"


def test_a_rank_that_leaves_before_it_is_ready_is_dead_on_any_machine(
    folder: SocketFolder, rank_module: Any
) -> None:
    with started(folder, rank_module("sys.exit(0)"), on_left=lambda: None) as (_, deaths):
        wait_until(lambda: deaths)
        assert "scheduler died during initialization (exit code: 0)" in deaths[0]


def test_the_end_gives_every_descriptor_back(folder: SocketFolder, rank_module: Any) -> None:
    """A process may start and end engines all day."""

    def held() -> list[str]:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them is gone again
                names.append(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))
        return sorted(names)

    gc.collect()  # what other tests have left behind must not go in the middle of this one
    module, before = rank_module(READY + "time.sleep(60)"), held()
    with started(folder, module, count=2) as (ranks, _):
        ranks.wait_ready()
        assert len(held()) > len(before) and all(beat.age() == float("inf") for _, beat in ranks.heartbeats)
    assert held() == before
    assert all(beat.age() == float("inf") for _, beat in ranks.heartbeats), (
        "an asker is answered all the same"
    )


def test_a_rank_that_ignores_everything_is_killed(
    folder: SocketFolder, rank_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_EOF_GRACE_S", 0.2)
    # SIGSTOP: not even the thread that watches the parent can run.
    with started(folder, rank_module(READY + "os.kill(os.getpid(), 19)")) as (ranks, _):
        (pid,) = ranks.pids
        wait_until(lambda: process_state(pid) == "T")
    assert not pathlib.Path(f"/proc/{pid}").exists()


def test_a_rank_finds_a_module_that_only_its_parent_was_told_of(
    folder: SocketFolder, rank_module: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.path.insert(0, ...)` in a script, and the rank ended without a reason."""
    module = rank_module(READY + "time.sleep(60)")
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.syspath_prepend(tmp_path)
    with started(folder, module) as (ranks, deaths):
        ranks.wait_ready()
    assert deaths == []


def test_the_folder_of_the_program_shadows_nothing_in_a_rank(tmp_path: pathlib.Path) -> None:
    """A `queue.py` beside a script must not become the rank's."""
    package = str(pathlib.Path(rank_environment.__file__).parents[3])
    found = rank_environment.module_search_path(["/prog", "", "/lib", "/lib", package], "/prog/script.py")
    assert found == ["/lib", package, "/prog", os.getcwd()]
    assert rank_environment.module_search_path(["/lib"], None) == ["/lib", package]
    relative = rank_environment.module_search_path([f"{os.getcwd()}/prog", "/lib"], "prog/script.py")
    assert relative == ["/lib", f"{os.getcwd()}/prog", package]
    beside = rank_environment.module_search_path([package, "/lib"], f"{package}/script.py")
    assert beside == [package, "/lib"], "our own package is the parent's, wherever the program lies"


def test_a_rank_works_though_its_parents_folder_is_gone(
    folder: SocketFolder, rank_module: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's libraries ask for the working folder, and end the process when there is none."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with started(folder, rank_module("os.getcwd()\n" + READY + "time.sleep(60)")) as (ranks, deaths):
        ranks.wait_ready()
    assert deaths == []


def test_a_full_disk_is_noticed_before_a_rank_is_started(
    folder: SocketFolder, rank_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the heartbeat's file is filled at the first beat, which a full disk answers with SIGBUS."""
    beat = folder.heartbeat_path(0)
    HeartbeatReader(beat)
    assert beat.stat().st_blocks > 0, "the file has holes"

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(rank_processes, "RankChild", None)  # calling it would be another error
    with pytest.raises(OSError, match="No space left"), started(folder, rank_module(READY)):
        pass


def test_threads_of_ranks_share_the_cores_and_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sglang.srt.processes.rank_environment.cpu_count", lambda: 4)
    assert rank_environment.rank_environment(0, 2)["GOMP_SPINCOUNT"] == "10000"
    assert "GOMP_SPINCOUNT" not in rank_environment.rank_environment(0, 4)
    monkeypatch.undo()
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    assert rank_environment.rank_environment(0, 1)["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment.rank_environment(0, 2 * cores)["OMP_NUM_THREADS"] == "1"
    assert rank_environment.rank_environment(0, 1)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert rank_environment.rank_environment(0, 1)["OMP_NUM_THREADS"] == "7"


def test_core_lists_give_each_rank_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_core_lists("0-2,5|3") == [{0, 1, 2, 5}, {3}]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-2|3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores_of_rank(1, 2) == {3}
    assert rank_environment.rank_environment(0, 2)["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ValueError, match="cores for 2 ranks"):
        cores_of_rank(0, 1)
    with pytest.raises(ValueError, match=r"SGLANG_CPU_OMP_THREADS_BIND: a rank cannot run on \[9999\]; this"):
        bind_to(frozenset({9999}))
    for wrong in ("3-1", "a", "1-", ""):
        with pytest.raises(ValueError, match="SGLANG_CPU_OMP_THREADS_BIND"):
            parse_core_lists(wrong)


# heartbeat, title, log


def test_a_heartbeat_tells_age_and_whether_a_forward_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sglang.srt.processes.heartbeat.time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "beat"
    reader = HeartbeatReader(path)
    assert reader.age() == float("inf")
    beat = Heartbeat(path)
    before = reader.steps
    beat.beat()
    assert reader.steps == before + 1
    now[0] += 3.5
    assert reader.age() == 3.5
    beat.forward_begin()
    assert reader.in_forward
    beat.forward_end()
    assert not reader.in_forward


def test_a_title_shows_in_the_process_list() -> None:
    code = (
        "from setproctitle import setproctitle as t; t('sglang::scheduler_TP0');"
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)), open('/proc/self/comm').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sglang::scheduler_TP0", "sglang::schedul"]


def line(message: str, *args: Any, ranks: str = "", **extra: Any) -> str:
    record = logging.LogRecord("x", logging.INFO, "f", 1, message, args, None)
    vars(record).update(extra)
    return LineFormatter(ranks).format(record)


def test_a_log_line_names_the_ranks_that_exist() -> None:
    assert rank_suffix((("DP", 0, 1), ("PP", 1, 2), ("TP", 3, 4))) == "PP1 TP3"
    assert line("hello", ranks="PP1 TP3").endswith(" PP1 TP3] hello")
    assert line("hello").endswith("] hello")


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\u2028b", "a\x1b[31mb", "a\x85b"])
def test_user_text_cannot_break_a_log_line(text: str) -> None:
    """Otherwise a prompt could write a ready line, or hide one."""
    written = line("Receive: %s", text)
    assert len(written.splitlines()) == 1
    assert "\x1b" not in written
    assert len(line("%s", "a\nb", many_lines=True).splitlines()) == 2


def test_a_log_configuration_that_cannot_be_used_is_refused_by_its_variable(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.json"
    with envs.SGLANG_LOGGING_CONFIG_PATH.override(str(path)):
        for text in (
            None,
            "{",
            "[]",
            '{"version": 7}',
            '{"version": 1, "handlers": {"a": {"class": "no.such"}}}',
        ):
            if text is not None:
                path.write_text(text)
            with pytest.raises(ValueError, match=f"^SGLANG_LOGGING_CONFIG_PATH={path}: "):
                configure_logging("info", logger_name="planted")

"""Owns the rank processes of one engine: start, readiness, the watch over their lives, and the end.

Used by the doors: server, Engine, and machines that only run ranks. Ranks are plain `python -m` children that
get their configuration through a pipe; this module must not load a model, speak to a scheduler or install a
signal handler.
"""

from __future__ import annotations

import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.environ import child_environment
from sglang.srt.messages import io_struct
from sglang.srt.platforms import cpu_count
from sglang.srt.processes.cpu_binding import cores_of_rank
from sglang.srt.processes.heartbeat import HeartbeatReader
from sglang.srt.processes.hold_watch import HoldWatch, process_state
from sglang.srt.processes.rank_config import RankConfig, read_frame, write_frame

logger = logging.getLogger(__name__)

#: About 100 us: longer than the gap between two products of a step, so that a thread is not woken for each of
#: them, and short enough to give its core up to whoever else wants it.
SPINS_BEFORE_SLEEP = "10000"
RANK_MODULE = "sglang.srt.processes.rank_main"
#: A rank learns of our end from end-of-file on its pipe; this long it may take to go by itself.
_EOF_GRACE_S = 2.0
#: A loop that runs no forward counts as stuck no sooner than this, however short the watchdog's time is.
_IDLE_LOOP_ALLOWANCE_S = 20.0
#: How long a stuck rank gets to write its stacks before it is declared dead.
_DUMP_GRACE_S = 2.0
#: A rank whose peer is gone complains at once; the peer's own word, or its exit, may come this much later.
PRIMARY_CAUSE_WAIT_S = 2.0


class RankDied(RuntimeError):
    """A rank is gone; the text is the first cause that was seen."""


class _Rank:
    """One child: its process, our ends of its two pipes, and what is known of it."""

    def __init__(self, config: RankConfig, module: str, environment: dict[str, str]) -> None:
        self.config = config
        self.ready: io_struct.RankReady | None = None
        self.cause: str | None = None
        self.failed: io_struct.RankFailed | None = None
        self.said_all = False
        config_read, self.config_fd = os.pipe()
        self.status_fd, status_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                # -P: the current folder must not shadow modules of the child.
                [sys.executable, "-P", "-m", module, str(config_read), str(status_write)],
                env=environment,
                cwd=None if working_folder() else "/",
                stdin=subprocess.DEVNULL,
                pass_fds=(config_read, status_write),
            )
        except OSError:
            os.close(self.config_fd)
            os.close(self.status_fd)
            raise
        finally:
            os.close(config_read)
            os.close(status_write)
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def name(self) -> str:
        return f"{self.config.label} (pid {self.process.pid})"

    def tell(self) -> None:
        """Hand over the configuration; the pipe stays open, its end is our death."""
        try:
            write_frame(self.config_fd, msgspec.msgpack.encode(self.config))
        except BrokenPipeError:
            logger.debug("%s was gone before it read its configuration", self.name)

    def close_config(self) -> None:
        if self.config_fd >= 0:
            os.close(self.config_fd)
            self.config_fd = -1

    def close(self) -> None:
        self.close_config()
        os.close(self.status_fd)
        os.close(self.pidfd)

    @property
    def is_stopped(self) -> bool:
        """A signal (SIGSTOP, a debugger) holds the process: it neither answers nor ends."""
        return process_state(self.process.pid) in ("T", "t")

    @property
    def left_in_order(self) -> bool:
        return self.ready is not None and self.process.returncode == 0

    def describe_exit(self) -> str:
        code = self.process.returncode
        when = "" if self.ready else " during initialization"
        if code is not None and code < 0:
            reason = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            hint = "; the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
            return f"{self.name} {reason}{when}{hint}"
        return f"{self.name} scheduler died{when} (exit code: {code})"


class RankProcesses:
    """All ranks of one engine on this machine. A thread watches them; `on_death` is called there, once, with
    the first cause.

    A rank that stays stopped for `hold_limit` seconds is dead, whatever it was doing: its peers may wait on
    another machine, or it has none.

    `on_left` is for a machine that follows another one: its ranks are told to leave by their peers, and it is
    called when all have left in order. Without it a rank that leaves by itself counts as dead.
    """

    def __init__(
        self,
        configs: Sequence[RankConfig],
        *,
        on_death: Callable[[str], None],
        on_left: Callable[[], None] | None = None,
        watchdog_timeout: float | None = None,
        hold_limit: float | None = None,
        module: str = RANK_MODULE,
    ) -> None:
        self._on_death = on_death
        self._on_left = on_left
        #: What a rank said of its peers, and until when a better cause is waited for.
        self._suspicion: tuple[str, float] | None = None
        self._watchdog_timeout = watchdog_timeout or float("inf")
        self._holds = HoldWatch(DIST_TIMEOUT_S if hold_limit is None else hold_limit)
        self._changed = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._cause: str | None = None
        self._secondary = False
        self._ranks: list[_Rank] = []
        self._wake_read, self._wake_write = os.pipe()
        self._heartbeats = [HeartbeatReader(config.heartbeat) for config in configs]
        try:
            for config in configs:
                environment = rank_environment(config.local_rank, config.ranks_on_host)
                self._ranks.append(_Rank(config, module, environment))
        except (OSError, ValueError):
            self._kill_all()
            raise
        for rank in self._ranks:
            rank.tell()
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    @property
    def cause(self) -> str | None:
        """Why the ranks are gone, or None while all live."""
        return self._cause

    @property
    def cause_is_secondary(self) -> bool:
        """Ranks lost their peers, and none of this machine is to blame."""
        return self._secondary

    @property
    def heartbeats(self) -> list[tuple[str, HeartbeatReader]]:
        """The pulse of every rank, with its name."""
        return [(rank.config.label, heartbeat) for rank, heartbeat in zip(self._ranks, self._heartbeats)]

    def wait_ready(self) -> list[io_struct.RankReady]:
        """Block until every rank is loaded; `RankDied` with the first cause when one is gone before."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause or self._stopping or all(r.ready for r in self._ranks))
            if self._cause:
                raise RankDied(self._cause)
            if self._stopping:
                raise RankDied("the engine was shut down while it started")
            return [rank.ready for rank in self._ranks if rank.ready]

    def stop(self, *, grace_s: float) -> None:
        """End every rank: wait `grace_s` for those told to leave, then end-of-file, then SIGKILL."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = self._stopping = True
            self._changed.notify_all()
        for seconds, act in ((grace_s, None), (_EOF_GRACE_S, _Rank.close_config)):
            if act is not None:
                for rank in self._ranks:
                    act(rank)
            if self._wait_all(seconds):
                break
        self._kill_all()
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for rank, heartbeat in zip(self._ranks, self._heartbeats):
            rank.close()
            heartbeat.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wait_all(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()

    # --- the watcher's thread ---

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        by_fd: dict[int, _Rank] = {}
        for rank in self._ranks:
            for fd in (rank.status_fd, rank.pidfd):
                by_fd[fd] = rank
                poller.register(fd, select.POLLIN)
        while True:
            events = [fd for fd, _ in poller.poll(self._poll_ms())]
            self._holds.turn()
            if self._wake_read in events:
                return
            # A rank's last words come before its exit, whatever order the kernel lists them in.
            for fd in sorted(events, key=lambda fd: fd == by_fd[fd].pidfd):
                rank = by_fd[fd]
                if fd == rank.status_fd:
                    if not self._read_status(rank):
                        poller.unregister(fd)
                        rank.said_all = True
                    continue
                poller.unregister(fd)
                rank.process.wait()
                while not rank.said_all and _is_readable(rank.status_fd):
                    rank.said_all = not self._read_status(rank)
                self._take_exit(rank)
            if self._suspicion is not None and time.monotonic() >= self._suspicion[1]:
                complaint, self._suspicion = self._suspicion[0], None
                cause = self._cause_behind(complaint)
                self._secondary = cause == complaint and self._cause is None
                self._report(cause)
            elif not events:
                self._look_for_held_ranks()
                self._look_for_stuck_ranks()

    def _poll_ms(self) -> int:
        if self._suspicion is None:
            return 1000
        return max(0, min(1000, int((self._suspicion[1] - time.monotonic()) * 1000) + 1))

    def _take_exit(self, rank: _Rank) -> None:
        if rank.failed is not None and rank.failed.secondary and rank.process.returncode >= 0:
            return  # it has said what it knows, and waits behind its suspicion
        if self._on_left is not None and rank.left_in_order:
            if all(other.process.poll() is not None and other.left_in_order for other in self._ranks):
                self._on_left()
            return
        self._report(rank.cause or rank.describe_exit())

    def _cause_behind(self, complaint: str) -> str:
        """Nobody gave a reason: who of this machine kept silent while its peers gave up?"""
        silent = [rank for rank in self._ranks if rank.failed is None and rank.process.poll() is None]
        for rank in silent:
            if rank.is_stopped:
                return f"{rank.name} is stopped by a signal (SIGSTOP or a debugger); {complaint}"
        if not silent:
            return complaint
        logger.error("%s did not answer; stacks follow", ", ".join(rank.name for rank in silent))
        self._dump_stacks(silent)
        return f"{silent[0].name} did not answer its peers; {complaint}"

    def _read_status(self, rank: _Rank) -> bool:
        """Take one message of a rank; False at the end of its pipe."""
        frame = read_frame(rank.status_fd)
        if frame is None:
            return False
        message = io_struct.decode(frame)
        if isinstance(message, io_struct.RankReady):
            with self._changed:
                rank.ready = message
                self._changed.notify_all()
        elif isinstance(message, io_struct.RankFailed):
            rank.failed = message
            rank.cause = f"{rank.name}: {message.message}"
            if message.secondary:
                # Most likely its peer is the cause: the traceback would only point at a socket.
                logger.error("%s lost its peers: %s", rank.name, message.message)
                if self._suspicion is None:
                    self._suspicion = (rank.cause, time.monotonic() + PRIMARY_CAUSE_WAIT_S)
            else:
                if message.traceback:
                    logger.error("%s failed:\n%s", rank.name, message.traceback, extra={"many_lines": True})
                self._report(rank.cause)
        return True

    def _look_for_held_ranks(self) -> None:
        held = self._holds.held(self.pids)
        for rank in self._ranks:
            held_s = held.get(rank.process.pid, 0.0)
            if held_s >= self._holds.limit_s:
                self._report(
                    f"{rank.name} is stopped by a signal (SIGSTOP) and has not gone on for {held_s:.0f} s "
                    "(--dist-timeout)"
                )

    def _look_for_stuck_ranks(self) -> None:
        """One stuck rank holds all its peers up, so all are looked at; the oldest pulse is named."""
        if self._stopping or self._cause:
            return
        stuck = []
        for rank, heartbeat in zip(self._ranks, self._heartbeats):
            age = min(heartbeat.age(), self._holds.awake_s)
            # Between forwards a loop turns once a second, but a busy machine may hold it up longer than that.
            allowed = self._watchdog_timeout
            if not heartbeat.in_forward:
                allowed = max(allowed, _IDLE_LOOP_ALLOWANCE_S)
            if rank.ready and allowed < age < float("inf"):
                stuck.append((rank.is_stopped, age, rank))
        if not stuck:
            return
        stuck.sort(key=lambda entry: entry[:2], reverse=True)
        is_stopped, age, rank = stuck[0]
        logger.error("watchdog timeout: %s has made no progress for %.0f s; stacks follow", rank.name, age)
        self._dump_stacks([rank for _, _, rank in stuck])
        why = "it is stopped by a signal; " if is_stopped else ""
        self._report(f"{rank.name} made no progress for {age:.0f} s ({why}--watchdog-timeout)")

    @staticmethod
    def _dump_stacks(ranks: Sequence[_Rank]) -> None:
        """A rank registers a stack dump for this signal; it goes to its standard error."""
        for rank in ranks:
            rank.process.send_signal(signal.SIGUSR1)
        time.sleep(_DUMP_GRACE_S)

    def _report(self, cause: str) -> None:
        with self._changed:
            if self._cause or self._stopping:
                return
            self._cause = cause
            self._changed.notify_all()
        self._on_death(cause)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def working_folder() -> str | None:
    """Where this process works, None when that folder has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def module_search_path(path: Sequence[str], main_file: str | None) -> list[str]:
    """Where a rank looks for modules: where its parent does and in that order, this package included, but the
    program's own folder comes last, so that a file beside the program shadows nothing.
    """
    here = working_folder()
    package = str(pathlib.Path(__file__).parents[3])
    program = None if main_file is None else os.path.dirname(os.path.join(here or os.sep, main_file))
    own = {"", here, program} - {package}
    first = [entry for entry in path if entry not in own]
    last = [entry or here for entry in path if entry in own]
    return list(dict.fromkeys(entry for entry in (*first, *last, package) if entry))


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """The environment of a rank: it finds the modules that we find; OpenMP threads share the cores and give
    them up when they wait, unless the user says else.
    """
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    environment = _thread_environment(rank, num_ranks)
    # What was stated for children since we started is not on our own path.
    stated = environment.get("PYTHONPATH", "").split(os.pathsep)
    found = dict.fromkeys([*module_search_path(sys.path, main_file), *filter(None, stated)])
    return {**environment, "PYTHONPATH": os.pathsep.join(found)}


def _thread_environment(rank: int, num_ranks: int) -> dict[str, str]:
    bound = cores_of_rank(rank, num_ranks)
    threads = max(1, cpu_count() // num_ranks) if bound is None else len(bound)
    if threads == 1:
        return child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return child_environment(
        OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=SPINS_BEFORE_SLEEP
    )

"""Owns the rank processes of one engine: start, readiness, the watch over their lives, and the end.

Used by the doors (server, Engine) and later by the data-parallel controller. Ranks are plain `python -m`
children that get their configuration through a pipe; this module must not load a model, speak to a scheduler
or install a signal handler.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from sglang.srt.environ import child_environment
from sglang.srt.managers.rank_config import RankConfig, read_frame, write_frame
from sglang.srt.messages import io_struct
from sglang.srt.platforms import cpu_count
from sglang.srt.utils.cpu_binding import cores_of_rank
from sglang.srt.utils.heartbeat import HeartbeatReader

logger = logging.getLogger(__name__)

#: About 100 us: longer than the gap between two products of a step, so that a thread is not woken for each of
#: them, and short enough to give its core up to whoever else wants it.
SPINS_BEFORE_SLEEP = "10000"
RANK_MODULE = "sglang.srt.entrypoints.rank_main"
#: A rank learns of our end from end-of-file on its pipe; this long it may take to go by itself.
_EOF_GRACE_S = 2.0
#: A loop that runs no forward counts as stuck no sooner than this, however short the watchdog's time is.
_IDLE_LOOP_ALLOWANCE_S = 20.0
#: How long a stuck rank gets to write its stacks before it is declared dead.
_DUMP_GRACE_S = 2.0


class RankDied(RuntimeError):
    """A rank is gone; the text is the first cause that was seen."""


class _Rank:
    """One child: its process, our ends of its two pipes, and what is known of it."""

    def __init__(self, config: RankConfig, module: str, environment: dict[str, str]) -> None:
        self.config = config
        self.ready: io_struct.RankReady | None = None
        self.cause: str | None = None
        config_read, self.config_fd = os.pipe()
        self.status_fd, status_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                # -P: the current folder must not shadow modules of the child.
                [sys.executable, "-P", "-m", module, str(config_read), str(status_write)],
                env=environment,
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
        return f"rank {self.config.world_rank} (pid {self.process.pid})"

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

    def describe_exit(self) -> str:
        code = self.process.returncode
        when = "" if self.ready else " during initialization"
        if code is not None and code < 0:
            reason = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            hint = "; the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
            return f"{self.name} {reason}{when}{hint}"
        return f"{self.name} scheduler died{when} (exit code: {code})"


class RankProcesses:
    """All ranks of one engine. A thread watches them; `on_death` is called there, once, with the first
    cause.
    """

    def __init__(
        self,
        configs: Sequence[RankConfig],
        *,
        on_death: Callable[[str], None],
        watchdog_timeout: float | None = None,
        module: str = RANK_MODULE,
    ) -> None:
        self._on_death = on_death
        self._watchdog_timeout = watchdog_timeout or float("inf")
        self._changed = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._cause: str | None = None
        self._ranks: list[_Rank] = []
        self._wake_read, self._wake_write = os.pipe()
        try:
            for number, config in enumerate(configs):
                self._ranks.append(_Rank(config, module, rank_environment(number, len(configs))))
        except (OSError, ValueError):
            self._kill_all()
            raise
        for rank in self._ranks:
            rank.tell()
        self._heartbeats = [HeartbeatReader(config.heartbeat) for config in configs]
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
    def heartbeats(self) -> list[HeartbeatReader]:
        return self._heartbeats

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
        for rank in self._ranks:
            rank.close()
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
            events = [fd for fd, _ in poller.poll(1000)]
            if self._wake_read in events:
                return
            # A rank's last words come before its exit, whatever order the kernel lists them in.
            for fd in sorted(events, key=lambda fd: fd == by_fd[fd].pidfd):
                rank = by_fd[fd]
                if fd == rank.status_fd and not self._read_status(rank):
                    poller.unregister(fd)
                elif fd == rank.pidfd:
                    poller.unregister(fd)
                    rank.process.wait()
                    self._report(rank.cause or rank.describe_exit())
            if not events:
                self._look_for_stuck_ranks()

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
            rank.cause = f"{rank.name}: {message.message}"
            logger.error("%s failed:\n%s", rank.name, message.traceback, extra={"many_lines": True})
            self._report(rank.cause)
        return True

    def _look_for_stuck_ranks(self) -> None:
        for rank, heartbeat in zip(self._ranks, self._heartbeats):
            age = heartbeat.age()
            # Between forwards a loop turns once a second, but a busy machine may hold it up longer than that.
            allowed = self._watchdog_timeout
            if not heartbeat.in_forward:
                allowed = max(allowed, _IDLE_LOOP_ALLOWANCE_S)
            if rank.ready and not self._stopping and allowed < age < float("inf"):
                logger.error(
                    "watchdog timeout: %s has made no progress for %.0f s; its stacks follow", rank.name, age
                )
                # The rank registers a stack dump for this signal; it goes to its standard error.
                rank.process.send_signal(signal.SIGUSR1)
                time.sleep(_DUMP_GRACE_S)
                self._report(f"{rank.name} made no progress for {age:.0f} s (--watchdog-timeout)")
                return

    def _report(self, cause: str) -> None:
        with self._changed:
            if self._cause or self._stopping:
                return
            self._cause = cause
            self._changed.notify_all()
        self._on_death(cause)


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """The environment of a rank: OpenMP threads share the cores and give them up when they wait, unless the
    user says else.
    """
    bound = cores_of_rank(rank, num_ranks)
    threads = max(1, cpu_count() // num_ranks) if bound is None else len(bound)
    if threads == 1:
        return child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return child_environment(
        OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=SPINS_BEFORE_SLEEP
    )

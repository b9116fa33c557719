"""Owns the watch over running ranks: who is ready, who is gone, stuck or stopped, and the first cause.

Run by `RankProcesses` on a thread of its own. It must not end a rank: it reports, others act.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

from sglang.srt.messages import io_struct
from sglang.srt.processes.heartbeat import HeartbeatReader
from sglang.srt.processes.hold_watch import HoldWatch
from sglang.srt.processes.rank_child import RankChild

logger = logging.getLogger(__name__)

#: A loop that runs no forward counts as stuck no sooner than this, however short the watchdog's time is.
_IDLE_LOOP_ALLOWANCE_S = 20.0
#: How long a stuck rank gets to write its stacks before it is declared dead.
_DUMP_GRACE_S = 2.0
#: A rank whose peer is gone complains at once; the peer's own message, or its exit, may come this much later.
PRIMARY_CAUSE_WAIT_S = 2.0


class RankWatch:
    """`on_death` is called once, on the watch's thread, with the first cause.

    `on_left` is called when all ranks have left in order; without it a rank that leaves by itself counts as
    dead.
    """

    def __init__(
        self,
        ranks: Sequence[RankChild],
        heartbeats: Sequence[HeartbeatReader],
        *,
        on_death: Callable[[str], None],
        on_left: Callable[[], None] | None,
        watchdog_timeout: float,
        hold_limit: float,
    ) -> None:
        self.cause: str | None = None
        #: Ranks lost their peers, and none of this machine is to blame.
        self.cause_is_secondary = False
        self._ranks = ranks
        self._heartbeats = heartbeats
        self._on_death = on_death
        self._on_left = on_left
        self._watchdog_timeout = watchdog_timeout
        self._holds = HoldWatch(hold_limit)
        self._changed = threading.Condition()
        self._stopping = False
        #: What a rank said of its peers, and until when a better cause is waited for.
        self._complaint: tuple[str, float] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="rank-watcher", daemon=True)
        self._thread.start()

    def wait_ready(self) -> bool:
        """Block until every rank is ready; False when one is gone or the end has begun before."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.cause or self._stopping or all(rank.ready for rank in self._ranks)
            )
            return not self.cause and not self._stopping

    def begin_stop(self) -> bool:
        """From now on exits are expected and nothing is reported; False when this was said before."""
        with self._changed:
            if self._stopping:
                return False
            self._stopping = True
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """End the thread; it may be the one that calls."""
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        by_fd: dict[int, RankChild] = {}
        for rank in self._ranks:
            for fd in (rank.status_fd, rank.pidfd):
                by_fd[fd] = rank
                poller.register(fd, select.POLLIN)
        while True:
            events = [fd for fd, _ in poller.poll(self._poll_ms())]
            self._holds.tick()
            if self._wake_read in events:
                return
            # A rank's last message comes before its exit, whatever order the kernel lists them in.
            for fd in sorted(events, key=lambda fd: fd == by_fd[fd].pidfd):
                rank = by_fd[fd]
                if fd == rank.status_fd:
                    self._take_status(rank)
                    if rank.status_ended:
                        poller.unregister(fd)
                else:
                    poller.unregister(fd)
                    rank.process.wait()
                    while rank.has_status:
                        self._take_status(rank)
                    self._take_exit(rank)
            if self._complaint is not None and time.monotonic() >= self._complaint[1]:
                self._report_complaint()
            elif not events:
                self._report_held_ranks()
                self._report_stuck_ranks()

    def _poll_ms(self) -> int:
        if self._complaint is None:
            return 1000
        return max(0, min(1000, int((self._complaint[1] - time.monotonic()) * 1000) + 1))

    def _take_status(self, rank: RankChild) -> None:
        message = rank.read_status()
        if isinstance(message, io_struct.RankReady):
            with self._changed:
                self._changed.notify_all()
        elif isinstance(message, io_struct.RankFailed):
            if message.secondary:
                # Most likely its peer is the cause: the traceback would only point at a socket.
                logger.error("%s lost its peers: %s", rank.name, message.message)
                if self._complaint is None:
                    self._complaint = (rank.said_cause, time.monotonic() + PRIMARY_CAUSE_WAIT_S)
            else:
                if message.traceback:
                    logger.error("%s failed:\n%s", rank.name, message.traceback, extra={"many_lines": True})
                self._report(rank.said_cause)

    def _take_exit(self, rank: RankChild) -> None:
        if rank.failed is not None and rank.failed.secondary and rank.process.returncode >= 0:
            return  # it has complained of its peers, and their cause is waited for
        if self._on_left is not None and rank.left_in_order:
            if all(other.process.poll() is not None and other.left_in_order for other in self._ranks):
                self._on_left()
            return
        self._report(rank.said_cause or rank.describe_exit())

    def _report_complaint(self) -> None:
        """The wait for a better cause is over."""
        assert self._complaint is not None
        complaint, self._complaint = self._complaint[0], None
        cause = self._cause_behind(complaint)
        self.cause_is_secondary = cause == complaint and self.cause is None
        self._report(cause)

    def _cause_behind(self, complaint: str) -> str:
        """Nobody gave a reason: which rank of this machine kept silent while its peers gave up?"""
        silent = [rank for rank in self._ranks if rank.failed is None and rank.process.poll() is None]
        for rank in silent:
            if rank.is_stopped:
                return f"{rank.name} is stopped by a signal (SIGSTOP or a debugger); {complaint}"
        if not silent:
            return complaint
        logger.error("%s did not answer; stacks follow", ", ".join(rank.name for rank in silent))
        _dump_stacks(silent)
        return f"{silent[0].name} did not answer its peers; {complaint}"

    def _report_held_ranks(self) -> None:
        """A rank that stays stopped is dead, whatever it was doing: its peers may wait on another machine."""
        held = self._holds.held(rank.process.pid for rank in self._ranks)
        for rank in self._ranks:
            held_s = held.get(rank.process.pid, 0.0)
            if held_s >= self._holds.limit_s:
                self._report(
                    f"{rank.name} is stopped by a signal (SIGSTOP) and has not gone on for {held_s:.0f} s "
                    "(--dist-timeout)"
                )

    def _report_stuck_ranks(self) -> None:
        """One stuck rank holds all its peers up, so all are looked at; the oldest heartbeat is named."""
        if self._stopping or self.cause:
            return
        stuck = []
        for rank, heartbeat in zip(self._ranks, self._heartbeats):
            age = min(heartbeat.age(), self._holds.awake_s)
            # Between forwards a loop beats once a second, but a busy machine may hold it up longer than that.
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
        _dump_stacks([rank for _, _, rank in stuck])
        why = "it is stopped by a signal; " if is_stopped else ""
        self._report(f"{rank.name} made no progress for {age:.0f} s ({why}--watchdog-timeout)")

    def _report(self, cause: str) -> None:
        with self._changed:
            if self.cause or self._stopping:
                return
            self.cause = cause
            self._changed.notify_all()
        self._on_death(cause)


def _dump_stacks(ranks: Sequence[RankChild]) -> None:
    """A rank writes its stacks to its standard error at this signal."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGUSR1)
    time.sleep(_DUMP_GRACE_S)

"""Owns the rank processes of one engine on this machine, from their start to their end.

Used by the doors: server, Engine, and machines that only run ranks. Ranks are plain `python -m` children that
get their configuration through a pipe; this module must not load a model, speak to a scheduler or install a
signal handler.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.messages import io_struct
from sglang.srt.processes.heartbeat import HeartbeatReader
from sglang.srt.processes.rank_child import RankChild
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.rank_watch import RankWatch

RANK_MODULE = "sglang.srt.processes.rank_main"
#: A rank learns of our end from end-of-file on its pipe; this long it may take to go by itself.
_EOF_GRACE_S = 2.0


class RankDied(RuntimeError):
    """A rank is gone; the text is the first cause that was seen."""


class RankProcesses:
    """All ranks of one engine on this machine; `on_death` is called once, on a thread, with the first cause.

    A rank that stays stopped for `hold_limit` seconds counts as dead.

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
        self._ranks: list[RankChild] = []
        self._heartbeats = [HeartbeatReader(config.heartbeat) for config in configs]
        try:
            for config in configs:
                self._ranks.append(RankChild(config, module))
        except (OSError, ValueError):
            self._kill_all()
            raise
        for rank in self._ranks:
            rank.send_config()
        self._watch = RankWatch(
            self._ranks,
            self._heartbeats,
            on_death=on_death,
            on_left=on_left,
            watchdog_timeout=watchdog_timeout or float("inf"),
            hold_limit=DIST_TIMEOUT_S if hold_limit is None else hold_limit,
        )

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    @property
    def cause(self) -> str | None:
        """Why the ranks are gone, or None while all live."""
        return self._watch.cause

    @property
    def cause_is_secondary(self) -> bool:
        """Ranks lost their peers, and none of this machine is to blame."""
        return self._watch.cause_is_secondary

    @property
    def heartbeats(self) -> list[tuple[str, HeartbeatReader]]:
        """The heartbeat of every rank, with its name."""
        return [(rank.config.label, heartbeat) for rank, heartbeat in zip(self._ranks, self._heartbeats)]

    def wait_ready(self) -> list[io_struct.RankReady]:
        """Block until every rank is loaded; `RankDied` with the first cause when one is gone before."""
        if not self._watch.wait_ready():
            raise RankDied(self.cause or "the engine was shut down while it started")
        return [rank.ready for rank in self._ranks if rank.ready]

    def stop(self, *, grace_s: float) -> None:
        """End every rank: wait `grace_s` for those told to leave, then end-of-file, then SIGKILL."""
        if not self._watch.begin_stop():
            return
        if not self._wait_all(grace_s):
            for rank in self._ranks:
                rank.close_config()
            self._wait_all(_EOF_GRACE_S)
        self._kill_all()
        self._watch.end()
        for rank, heartbeat in zip(self._ranks, self._heartbeats):
            rank.close()
            heartbeat.close()

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

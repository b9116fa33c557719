"""Owns the main loop of a machine that only runs ranks: `--node-rank` above 0.

Called by the server's main, which handles signals. It must not serve or decide anything: its ranks leave when
the server on machine 0 tells them to, and whatever else ends them ends this process with the cause.
"""

from __future__ import annotations

import logging
import signal
import threading

from sglang.srt.arg_groups.public_values import short_description
from sglang.srt.processes.machines.rank_layout import layout_line, rank_configs
from sglang.srt.processes.rank_processes import RankDied, RankProcesses
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.runtime_context import get_device, get_parallel, publish
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: How often the main thread looks whether a signal has come.
_POLL_S = 0.1


def run_node(record: ServerArgs, signals: list[int], *, rank_module: str) -> int:
    """Run this machine's ranks to their end; the exit code is 0 when they or we were told to leave.

    `signals` fills with the numbers of signals that ask for the end.
    """
    publish(record, role="controller")
    logger.info("server_args=%s", short_description(record))
    return _Node(record, rank_module).run(signals)


class _Node:
    """The ranks of one machine and how they end."""

    def __init__(self, record: ServerArgs, rank_module: str) -> None:
        self._cause: str | None = None
        self._over = threading.Event()
        self._folder = SocketFolder()
        try:
            configs = rank_configs(record, self._folder)
            logger.info("layout: %s", layout_line(len(configs)))
            parallel = get_parallel()
            self._name = f"machine {parallel.node_rank} of {parallel.nnodes}"
            logger.info("%s waits for the other machines at %s", self._name, configs[0].rendezvous)
            self._ranks = RankProcesses(
                configs,
                on_death=self._on_death,
                on_left=self._over.set,
                watchdog_timeout=get_device().watchdog_timeout,
                hold_limit=parallel.dist_timeout,
                module=rank_module,
            )
        except BaseException:
            self._folder.remove()
            raise

    def run(self, signals: list[int]) -> int:
        threading.Thread(target=self._log_when_ready, name="ready", daemon=True).start()
        while not self._over.wait(_POLL_S) and not signals:
            pass
        if self._cause is not None:
            logger.error("a scheduler process has died: %s", self._cause)
        elif signals:
            logger.info("%s received; %s leaves the deployment", signal.Signals(signals[0]).name, self._name)
        else:
            logger.info("the deployment has ended; %s leaves", self._name)
        self._ranks.stop(grace_s=0.0)
        self._folder.remove()
        return 0 if self._cause is None else 1

    def _log_when_ready(self) -> None:
        try:
            self._ranks.wait_ready()
        except RankDied:
            return  # `run` logs it
        logger.info("%s is ready; the server is on machine 0", self._name)

    def _on_death(self, cause: str) -> None:
        """Runs on the watch's thread."""
        self._cause = cause
        self._over.set()

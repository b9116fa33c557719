"""Owns one rank process as its parent sees it: the process, our ends of its two pipes, and what it has said.

Made by `RankProcesses`, read by the watch. It must not decide why a rank is gone: it describes one exit.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys

import msgspec

from sglang.srt.messages import io_struct
from sglang.srt.processes.hold_watch import process_state
from sglang.srt.processes.rank_config import RankConfig, read_frame, write_frame
from sglang.srt.processes.rank_environment import rank_environment, working_folder
from sglang.srt.utils.stop_signals import held_from_children

logger = logging.getLogger(__name__)


class RankChild:
    """Started by its constructor; it waits for `send_config` before it does anything."""

    def __init__(self, config: RankConfig, module: str) -> None:
        self.config = config
        self.ready: io_struct.RankReady | None = None
        self.failed: io_struct.RankFailed | None = None
        #: The rank has closed its status pipe: nothing more will be said.
        self.status_ended = False
        environment = rank_environment(config.local_rank, config.ranks_on_host)
        config_read, self._config_fd = os.pipe()
        self.status_fd, status_write = os.pipe()
        try:
            with held_from_children():
                self.process = subprocess.Popen(
                    # -P: the current folder must not shadow modules of the child.
                    [sys.executable, "-P", "-m", module, str(config_read), str(status_write)],
                    env=environment,
                    cwd=None if working_folder() else "/",
                    stdin=subprocess.DEVNULL,
                    pass_fds=(config_read, status_write),
                )
        except OSError:
            os.close(self._config_fd)
            os.close(self.status_fd)
            raise
        finally:
            os.close(config_read)
            os.close(status_write)
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def name(self) -> str:
        return f"{self.config.label} (pid {self.process.pid})"

    def send_config(self) -> None:
        """Hand over the configuration; the pipe stays open, and its end tells the rank that we are gone."""
        try:
            write_frame(self._config_fd, msgspec.msgpack.encode(self.config))
        except BrokenPipeError:
            logger.debug("%s was gone before it read its configuration", self.name)

    def close_config(self) -> None:
        """Tell the rank to leave, by end-of-file."""
        if self._config_fd >= 0:
            os.close(self._config_fd)
            self._config_fd = -1

    def close(self) -> None:
        self.close_config()
        os.close(self.status_fd)
        os.close(self.pidfd)

    def read_status(self) -> io_struct.Message | None:
        """Take the next message of the rank; None at the end of its pipe."""
        frame = read_frame(self.status_fd)
        if frame is None:
            self.status_ended = True
            return None
        message = io_struct.decode(frame)
        if isinstance(message, io_struct.RankReady):
            self.ready = message
        elif isinstance(message, io_struct.RankFailed):
            self.failed = message
        return message

    @property
    def has_status(self) -> bool:
        """Whether `read_status` would return at once."""
        poller = select.poll()
        poller.register(self.status_fd, select.POLLIN)
        return not self.status_ended and bool(poller.poll(0))

    @property
    def said_cause(self) -> str:
        """What the rank itself said of its failure, empty when nothing."""
        return "" if self.failed is None else f"{self.name}: {self.failed.message}"

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

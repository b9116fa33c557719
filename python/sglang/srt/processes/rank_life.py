"""Owns how a rank process behaves towards its parent: its pipes, its signals, its end when that is gone.

Used by the rank's entry and by the fake rank of the tests. It must stay free of torch, so that a rank can be
ended from its first moment on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pathlib
import select
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

import msgspec

from sglang.srt.messages import io_struct
from sglang.srt.processes.rank_config import RankConfig, read_frame, write_frame
from sglang.srt.processes.sockets import remove_socket_folder
from sglang.srt.utils.os_errors import with_cure
from sglang.srt.utils.standard_streams import bear_lost_error_output
from sglang.srt.utils.stop_signals import leave_to_parent

logger = logging.getLogger(__name__)

#: How long a dying parent may live on after its pipes are closed.
_GONE_AFTER_EOF_S = 0.3


class RankLife:
    """The two pipes of a rank, from its own side."""

    def __init__(self, config_fd: int, status_fd: int) -> None:
        self._config_fd = config_fd
        self._status_fd = status_fd
        for fd in (config_fd, status_fd):
            os.set_inheritable(fd, False)

    @classmethod
    def begin(cls, argv: list[str]) -> tuple[RankLife, RankConfig]:
        """Read the configuration, leave signals to the parent, and watch for its end."""
        if len(argv) != 3:
            raise SystemExit("a rank is started by the server or the Engine, not by hand")
        life = cls(int(argv[1]), int(argv[2]))
        leave_to_parent()
        bear_lost_error_output()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        frame = read_frame(config_fd := life._config_fd)
        if frame is None:
            raise SystemExit(
                "a rank leaves: the process that started it ended before it sent a configuration"
            )
        config = msgspec.msgpack.decode(frame, type=RankConfig)
        threading.Thread(
            target=_leave_with_parent, args=(config_fd, config), name="parent-watch", daemon=True
        ).start()
        return life, config

    def send_failure(
        self, world_rank: int, error: BaseException, *, secondary: bool = False, plain: bool = False
    ) -> None:
        """Send the cause, with its traceback for the server's log.

        `secondary` says that a peer failed first, `plain` that the cause alone is enough.
        """
        trace = "" if plain else "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {with_cure(error)}"
        self.send(
            io_struct.RankFailed(world_rank=world_rank, message=message, traceback=trace, secondary=secondary)
        )

    def send(self, message: io_struct.RankReady | io_struct.RankFailed) -> None:
        """Send one message to the parent, which may be gone."""
        try:
            write_frame(self._status_fd, io_struct.encode(message))
        except BrokenPipeError:
            logger.debug("the parent is gone")


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's clean-up, which would wait for lost peers."""
    logging.shutdown()
    with contextlib.suppress(OSError):  # what a library printed there must not keep this process
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_parent(config_fd: int, config: RankConfig) -> NoReturn:
    """End this process at once when the parent is gone.

    That shows as end-of-file on the pipe or, when a fork of the parent kept the pipe open, as another parent.
    """
    poller = select.poll()
    poller.register(config_fd, select.POLLIN)
    while not poller.poll(1000):
        if os.getppid() != config.parent_pid:
            break
    if _parent_died(config.parent_pid):
        # A killed parent could not log it; without this line the log would just stop.
        parent = f"the process that started it (pid {config.parent_pid})"
        with contextlib.suppress(OSError):
            os.write(2, f"rank {config.world_rank} leaves: {parent} is gone\n".encode())
    remove_socket_folder(pathlib.Path(config.folder))
    os._exit(1)


def _parent_died(parent_pid: int) -> bool:
    """Whether the end-of-file came from a dying parent, and not from one that ends this rank.

    A dying process closes its pipes before it is gone.
    """
    deadline = time.monotonic() + _GONE_AFTER_EOF_S
    while os.getppid() == parent_pid:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

"""Owns the heartbeat of one rank: a small mapped file with the time of its last step and of its forward.

Written by the scheduler loop of a rank, read by the server process for `/health` and the watchdog.
It must not lock, allocate or call the kernel when it writes: a step costs two stores.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import time

# Three 8-byte cells, each stored whole: [time of the last beat (CLOCK_MONOTONIC, seconds), 1.0 while a
# forward runs, steps so far].
_LAST, _IN_FORWARD, _STEPS = 0, 1, 2
_SIZE = 3 * 8


class Heartbeat:
    """The writing side. All processes of a host share CLOCK_MONOTONIC, so the reader compares directly."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._map = _open(path)
        self._cells = memoryview(self._map).cast("d")
        self.beat()

    def beat(self) -> None:
        """The loop has finished one more step."""
        self._cells[_LAST] = time.monotonic()
        self._cells[_STEPS] += 1.0

    def forward_begin(self) -> None:
        """A forward starts: until it ends the reader allows the watchdog's time instead of the loop's."""
        self._cells[_LAST] = time.monotonic()
        self._cells[_IN_FORWARD] = 1.0

    def forward_end(self) -> None:
        """The forward is over."""
        self._cells[_LAST] = time.monotonic()
        self._cells[_IN_FORWARD] = 0.0


class HeartbeatReader:
    """The reading side; its age is infinite while the writer has not written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._cells = memoryview(_open(path)).cast("d")

    def close(self) -> None:
        """Let the file go; the age is infinite from now on.

        Another thread may be reading: it ends with the old cells, and the mapping goes with the last who
        holds them.
        """
        self._cells = memoryview(bytes(_SIZE)).cast("d")

    def age(self) -> float:
        """Seconds since the last step ended, or since the running forward began."""
        last = self._cells[_LAST]
        return max(0.0, time.monotonic() - last) if last else float("inf")

    @property
    def in_forward(self) -> bool:
        return self._cells[_IN_FORWARD] != 0.0

    @property
    def steps(self) -> int:
        """How many steps the loop has finished (for tests)."""
        return int(self._cells[_STEPS])


def _open(path: str | os.PathLike[str]) -> mmap.mmap:
    fd = os.open(pathlib.Path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A hole in the file is filled at the first write, and on a full disk that kills the process.
        os.posix_fallocate(fd, 0, _SIZE)
        return mmap.mmap(fd, _SIZE)
    finally:
        os.close(fd)

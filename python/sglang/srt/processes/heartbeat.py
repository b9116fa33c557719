"""Owns the pulse of one rank: a small memory-mapped file that says when its loop last turned and whether a
forward runs.

Written by the scheduler loop of a rank, read by the server process for `/health` and the watchdog.
It must not lock, allocate or call the kernel on the write path: a turn costs two stores.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import time

# Three 8-byte cells, each stored whole: [last turn (CLOCK_MONOTONIC seconds), 1.0 while a forward runs, turns
# so far].
_TURN, _IN_FORWARD, _COUNT = 0, 1, 2
_SIZE = 3 * 8


class Heartbeat:
    """The writing side. CLOCK_MONOTONIC is one clock for all processes of a host, so the reader compares
    directly.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._map = _open(path, create=True)
        self._cells = memoryview(self._map).cast("d")
        self.turn()

    def turn(self) -> None:
        """The loop came round once more."""
        self._cells[_TURN] = time.monotonic()
        self._cells[_COUNT] += 1.0

    def forward_begin(self) -> None:
        """A forward starts: until it ends the reader allows the watchdog's time instead of the loop's."""
        self._cells[_TURN] = time.monotonic()
        self._cells[_IN_FORWARD] = 1.0

    def forward_end(self) -> None:
        """The forward is over."""
        self._cells[_TURN] = time.monotonic()
        self._cells[_IN_FORWARD] = 0.0


class HeartbeatReader:
    """The reading side; it may be opened before the writer has written (age is then infinite)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._cells = memoryview(_open(path, create=True)).cast("d")

    def close(self) -> None:
        """Let the file go; the age is infinite from now on. Another thread may be reading: it ends with the
        old cells, and the mapping goes with the last who holds them.
        """
        self._cells = memoryview(bytes(_SIZE)).cast("d")

    def age(self) -> float:
        """Seconds since the loop last turned, or since the running forward began."""
        last = self._cells[_TURN]
        return max(0.0, time.monotonic() - last) if last else float("inf")

    @property
    def in_forward(self) -> bool:
        return self._cells[_IN_FORWARD] != 0.0

    @property
    def turns(self) -> int:
        """How often the loop has turned (tests and dumps)."""
        return int(self._cells[_COUNT])


def _open(path: str | os.PathLike[str], *, create: bool) -> mmap.mmap:
    fd = os.open(pathlib.Path(path), os.O_RDWR | (os.O_CREAT if create else 0) | os.O_CLOEXEC, 0o600)
    try:
        # A hole would be filled at the first write, and on a full disk that ends the process by a signal.
        os.posix_fallocate(fd, 0, _SIZE)
        return mmap.mmap(fd, _SIZE)
    finally:
        os.close(fd)

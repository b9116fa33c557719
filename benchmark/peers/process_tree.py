"""One program with all its children: started on chosen cores, weighed, and stopped by process id.

Owns how a side of the comparison becomes a process and stops being one. Read by the sides. It must not end a
process that it did not start.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

#: Seconds that a program gets to end by itself.
PATIENCE_S = 15.0


def cores_for(threads: int) -> list[int]:
    """The cores of a side: the first ones that this process may use."""
    return sorted(os.sched_getaffinity(0))[:threads]


class ProcessTree:
    """`log` takes what the program prints; with `pipes` its standard input and output are ours instead."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        pipes: bool = False,
    ) -> None:
        self.log = log
        cores = cores_for(threads)
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("OPENBLAS_", "OMP_"))
        }
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                list(command),
                env={**own, "OMP_NUM_THREADS": str(threads), **(environment or {})},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else sink,
                stderr=sink,
                text=pipes,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop everything in order
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    @property
    def pipes(self) -> tuple[IO[str], IO[str]]:
        """Its standard input and output, as text."""
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def members(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def memory_bytes(self) -> int:
        """Resident memory of all its processes; a page that two of them share counts twice."""
        total = 0
        for member in self.members():
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """Ask the program to end, then end what is left of it and of its children."""
        members = self.members()
        if not self.has_ended():
            self.process.terminate()
        _, alive = psutil.wait_procs(members, timeout=patience_s)
        for member in alive:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=PATIENCE_S)
        self.process.wait(timeout=PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def last_lines(self, count: int = 5) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-count:])

"""Owns the rank processes of one world of the layout lab: started once, given one order after another, ended.

Read by `layout_lab`. It must not wait for ever for a rank, and must not leave one behind.
"""

from __future__ import annotations

import json
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from sglang.srt.environ import envs
from sglang.srt.processes.rank_config import read_frame, write_frame
from sglang.test.lab.messages import (
    JOINED,
    START_TIMEOUT_S,
    CellOrder,
    RankAnswer,
    RankError,
    decode_answer,
    encode,
)
from sglang.test.rank_nursery import Rank, nursery
from sglang.test.waiting import HANG_GUARD_S

#: After a rank has failed its peers get this long to answer; most are stuck in a collective.
GRACE_S = 1.0
_LOG_TAIL = 2000


class World:
    """`size` gloo ranks of this host. A cell in which a rank failed leaves the world `broken`: close it."""

    def __init__(self, size: int, *, timeout_s: float) -> None:
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="layout-world-")
        self._ranks: list[Rank] = []
        with envs.OMP_NUM_THREADS.override(1), envs.OMP_WAIT_POLICY.override("PASSIVE"):
            for rank in range(size):
                self._ranks.append(self._start(rank, timeout_s))
        frames = self._frames(time.monotonic() + START_TIMEOUT_S)
        absent = [rank for rank in range(size) if frames.get(rank) != JOINED]
        if absent:
            logs = "\n".join(self._log_tail(rank) for rank in absent)
            self.broken = True
            self.close()
            raise RuntimeError(f"a world of {size} ranks did not come up, without ranks {absent}:\n{logs}")

    def _start(self, rank: int, timeout_s: float) -> Rank:
        spec = {
            "world_rank": rank,
            "world_size": self.size,
            "meeting": f"{self._folder.name}/meeting",
            "timeout_s": timeout_s,
        }
        with self._log(rank).open("wb") as log:
            return nursery().start("sglang.test.lab.rank", json.dumps(spec), log=log, pipes=True)

    def order(self, orders: Sequence[CellOrder]) -> None:
        """Send one order to each rank, in rank order; `reports` takes the answers."""
        for process, order in zip(self._ranks, orders, strict=True):
            try:
                write_frame(_pipe(process.stdin), encode(order))
            except BrokenPipeError:
                pass  # it died after the last cell; `reports` will say so

    def reports(self, timeout_s: float) -> list[RankAnswer]:
        """One answer a rank; an error stands for a rank that died or did not answer in time."""
        frames = self._frames(time.monotonic() + timeout_s, until=_is_failure)
        answers = []
        for rank in range(self.size):
            if rank not in frames:
                message = "did not answer in time"
                answers.append(RankAnswer(error=RankError(kind="Stuck", message=message, traceback="")))
            elif (frame := frames[rank]) is None:
                self._ranks[rank].wait(HANG_GUARD_S)
                message = f"exit code {self._ranks[rank].returncode}"
                error = RankError(kind="Death", message=message, traceback=self._log_tail(rank))
                answers.append(RankAnswer(error=error))
            else:
                answers.append(decode_answer(frame))
        self.broken = any(answer.error is not None for answer in answers)
        return answers

    def _frames(
        self, deadline: float, until: Callable[[bytes], bool] = lambda frame: False
    ) -> dict[int, bytes | None]:
        """The next frame of each rank: None where it died, no entry where it was too late.

        After a death, or a frame for which `until` is true, the others get only `GRACE_S`.
        """
        frames: dict[int, bytes | None] = {}
        while len(frames) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {
                _pipe(process.stdout): rank for rank, process in enumerate(self._ranks) if rank not in frames
            }
            ready, _, _ = select.select(list(waiting), [], [], left)
            for pipe in ready:
                frame = frames[waiting[pipe]] = read_frame(pipe)
                if frame is None or until(frame):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return frames

    def _log_tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-_LOG_TAIL:]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def close(self) -> None:
        """End every rank: one that waits for an order leaves when its pipe ends, the others are killed."""
        for process in self._ranks:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + (0.0 if self.broken else 5.0)
        for process in self._ranks:
            if not process.wait(max(deadline - time.monotonic(), 0.01)):
                process.kill()
                process.wait(HANG_GUARD_S)
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]


def _pipe(end: IO[bytes] | None) -> int:
    assert end is not None  # every rank is started with both pipes
    return end.fileno()


def _is_failure(frame: bytes) -> bool:
    return decode_answer(frame).error is not None

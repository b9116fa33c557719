"""Owns for how long a signal has held each process, and whether this process itself was held.

Used by the watch over rank processes. It must not judge by the clock alone: time in which the watch did not
run counts against nobody.
"""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Iterable

logger = logging.getLogger(__name__)

#: The watch polls at least once a second. A gap of this much means that it could not run.
_GAP_S = 5.0
#: What one poll may add to the time of a process that is held.
_LONGEST_POLL_S = 2.0


class HoldWatch:
    """Counts, poll by poll, how long each process has been stopped without a break."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._last_tick = self._awake_since = time.monotonic()
        self._not_counted_s = 0.0
        self._held: dict[int, float] = {}

    def tick(self) -> None:
        """The watch has polled once more."""
        now = time.monotonic()
        gap = now - self._last_tick
        if gap > _GAP_S:
            self._awake_since = now
            logger.warning(
                "this process could not run for %.0f s (a signal, a suspended machine, or no CPU); "
                "ranks that were held with it may have missed --dist-timeout",
                gap,
            )
        self._not_counted_s += min(gap, _LONGEST_POLL_S)
        self._last_tick = now

    @property
    def awake_s(self) -> float:
        """For how long the watch has run without a gap; no process can be blamed for more."""
        return time.monotonic() - self._awake_since

    def held(self, pids: Iterable[int]) -> dict[int, float]:
        """pid -> seconds, of those that are stopped now. A debugger (state `t`) may take its time."""
        since_s, self._not_counted_s = self._not_counted_s, 0.0
        self._held = {
            pid: self._held[pid] + since_s if pid in self._held else 0.0
            for pid in pids
            if process_state(pid) == "T"
        }
        return self._held


def process_state(pid: int) -> str:
    """The letter of /proc: `T` stopped by a signal, `t` by a debugger, and so on; empty when it is gone."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The state follows the name, which stands in brackets and may hold anything.
    return stat.rpartition(")")[2].split()[0]

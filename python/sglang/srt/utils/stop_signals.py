"""Owns which signals ask a deployment to stop, and that a rank never acts on them by itself.

Used by the server's first moments, by the starter of ranks and by their life. It must import nothing heavy.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

#: A closed terminal (SIGHUP) counts as Ctrl-C. All of them may reach the whole process group.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def held_from_children() -> Iterator[None]:
    """A child that is started in here has them blocked from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Ignore the signals, which drops those that have come, and only then unblock them.

    What this process starts itself must be able to hear them.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

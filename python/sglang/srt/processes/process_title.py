"""Owns the name a process shows in `ps` and `top` (`sglang::scheduler_TP0`), which operators search for.

Called once by the entry of a rank. It must never make a start fail: a title is a courtesy, so what goes wrong
is only logged.
"""

from __future__ import annotations

import ctypes
import logging
import pathlib

logger = logging.getLogger(__name__)

_PR_SET_NAME = 15
# Fields 48 and 49 of /proc/self/stat (man proc): where the kernel reads the command line from, in our own
# memory.
_ARG_START, _ARG_END = 48, 49


def set_process_title(title: str) -> None:
    """Show `title` as command name (first 15 bytes, a kernel limit) and as command line (as far as the old
    one was long).
    """
    data = title.encode("ascii", "replace")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NAME, data[:15] + b"\0", 0, 0, 0) != 0:
        logger.debug("the command name could not be set (errno %d)", ctypes.get_errno())
    try:
        start, end = _command_line_span()
    except (OSError, ValueError, IndexError) as error:
        logger.debug("the command line could not be found: %s", error)
        return
    room = end - start
    if room < 2:
        logger.debug("the command line is not ours to write")
        return
    ctypes.memmove(start, data[: room - 1].ljust(room, b"\0"), room)


def _command_line_span() -> tuple[int, int]:
    stat = pathlib.Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    # The second field is the command in parentheses and may itself hold blanks; the third follows the last
    # ")".
    fields = stat[stat.rindex(")") + 2 :].split()
    return int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])

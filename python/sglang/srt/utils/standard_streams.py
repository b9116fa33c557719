"""Owns what happens when standard error or output cannot be written: the disk is full, the reader has left.

Used by the doors and by ranks, in their first moments. It must import nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from typing import Any


class _Lossy(io.FileIO):
    """Takes whatever it is given, as a log must: what cannot be written is lost."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


def bear_lost_error_output() -> None:
    """From here on nothing that this process says on standard error can raise, or change its exit code.

    A stream that somebody put in its place is left alone.
    """
    buffer = getattr(sys.stderr, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is io.FileIO and raw.fileno() == 2:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(2, "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )


def answered(prog: str, text: str) -> int:
    """Write what a command was asked for; its exit code, which is 1, with a sentence, where that cannot be.

    A reader that has seen enough (`| head`) ends it quietly, with the code that other tools end with then.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError as error:
        print(
            f"{prog}: error: standard output cannot be written ({error.strerror}); send it elsewhere",
            file=sys.stderr,
        )
        code = 1
    if sys.stdout is not None:
        # The interpreter would try the same once more when it leaves, and fail with a traceback.
        with contextlib.suppress(io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code

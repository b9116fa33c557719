"""Owns the first moments of a server's process: standard streams that are closed, and early signals.

Used by the command lines, before they import anything heavy. It must not know what is started.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from sglang.srt.utils.standard_streams import answered, bear_lost_error_output
from sglang.srt.utils.stop_signals import STOP_SIGNALS


def serve(
    argv: Sequence[str],
    *,
    prog: str | None = None,
    positional_model: bool = False,
    rank_module: str | None = None,
) -> int:
    """A server from its command line to its exit code."""
    output = sys.stdout
    fill_closed_streams(log_to_output=True)
    bear_lost_error_output()
    with signals_noted() as noted:
        from sglang.srt.entrypoints.server_main import run_server
        from sglang.srt.server_args import prepare_server_args

        said = io.StringIO()  # what `--help` prints; argparse would not tell that nobody can read it
        try:
            with contextlib.redirect_stdout(said):
                record = prepare_server_args(argv, positional_model=positional_model, prog=prog)
        except SystemExit as end:
            if end.code:
                raise
            sys.stdout = output
            return answered(prog or "sglang", said.getvalue())
        return run_server(record, rank_module=rank_module, noted=noted)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Record the signals that come, instead of acting on them; `ServerLife` reads the list when it begins.

    With the default action a signal before that would end the process without a line in the log.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)

    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    for number, action in before:
        if action != signal.SIG_IGN:  # the starter chose so: nohup
            signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, action in before:
            signal.signal(number, action)


def fill_closed_streams(*, log_to_output: bool) -> None:
    """Give a closed standard stream its number back, before a socket or a pipe gets it.

    What goes to standard error is lost when that is closed, or with `log_to_output` goes to standard output.
    """
    closed = [number for number in (0, 1, 2) if not _is_open(number)]
    for number in closed:
        if number == 2 and log_to_output and 1 not in closed:
            os.dup2(1, 2)
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        os.set_inheritable(opened, True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False))
    if 2 in closed and log_to_output:
        print("standard error is closed: the log goes to standard output", file=sys.stderr)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

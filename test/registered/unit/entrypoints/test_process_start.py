"""The first and the last moments of processes: closed streams, early signals, a start that fails."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import errno
import itertools
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from sglang.srt.messages import io_struct
from sglang.srt.processes import rank_main
from sglang.srt.processes.rank_life import RankLife
from sglang.srt.utils.os_errors import cure_of, with_cure

CLOSED = [numbers for count in range(4) for numbers in itertools.combinations((0, 1, 2), count)]
#: Takes the next free number, writes to both streams, and leaves that number in a file.
SCRIPT = """
import socket, sys
from sglang.srt.entrypoints.process_start import fill_closed_streams
{fill}
taken = socket.socket().fileno()
sys.stdout and print("to output")
sys.stderr and print("to error", file=sys.stderr)
open(sys.argv[1], "w").write(str(taken))
"""


def ran(closed: tuple[int, ...], tmp_path: pathlib.Path, fill: str) -> tuple[int, str, str]:
    """Number of the socket, and what arrived at the two streams."""
    note = tmp_path / "note"
    line = " ".join(f"{number}>&-" for number in closed)
    code = ["bash", "-c", f'exec "$@" {line}', "_", sys.executable, "-c", SCRIPT.format(fill=fill), str(note)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    return int(note.read_text()), done.stdout, done.stderr


@pytest.mark.parametrize("closed", CLOSED)
def test_no_socket_takes_the_number_of_a_closed_stream(
    closed: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    """What a library prints to number 2 would go to a client."""
    taken, output, error = ran(closed, tmp_path, "fill_closed_streams(log_to_output=True)")
    assert taken > 2
    assert ("to output" in output) == (1 not in closed)
    assert ("to error" in error) == (2 not in closed)
    assert (
        ("to error" in output)
        == ("log goes to standard output" in output)
        == (2 in closed and 1 not in closed)
    )


def test_a_library_writes_nothing_where_its_program_did_not_ask_for_it(tmp_path: pathlib.Path) -> None:
    """An Engine lives in a user's process, whose output is the user's."""
    taken, output, _ = ran((2,), tmp_path, "fill_closed_streams(log_to_output=False)")
    assert taken > 2 and output == "to output\n"


def test_the_twin_without_the_repair_takes_the_number(tmp_path: pathlib.Path) -> None:
    taken, _, _ = ran((2,), tmp_path, "")
    assert taken == 2


def test_an_error_of_the_system_names_its_cure() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert with_cure(full) == "[Errno 28] No space left on device: " + str(cure_of(full))
    assert "SGLANG_RUNTIME_DIR" in with_cure(full)
    for short in (MemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory: ...")):
        assert "memory is short" in with_cure(short)
    assert "ulimit -v" in with_cure(ImportError("libx.so: failed to map segment from shared object"))
    assert with_cure(ImportError("No module named 'x'")) == "No module named 'x'"
    assert with_cure(ValueError("as it is")) == "as it is"
    assert with_cure(OSError("without a number")) == "without a number"


class _Life:
    """Remembers the last words."""

    def __init__(self) -> None:
        self.words: list[dict[str, Any]] = []

    def send_failure(self, world_rank: int, error: Exception, **how: Any) -> None:
        self.words.append(how)


class _Config:
    world_rank = 0


@pytest.mark.parametrize(
    "error, starting, plain",
    [
        (ValueError("--flag 5: too much; take 4"), True, True),
        (OSError(errno.EMFILE, "Too many open files"), True, True),
        (ValueError("the same in the middle of the work"), False, False),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "a fault of ours"), True, False),
        (OSError(errno.EBADF, "Bad file descriptor"), True, False),
        (RuntimeError("a fault of ours"), True, False),
    ],
)
def test_a_start_that_the_operator_can_mend_is_told_without_a_traceback(
    error: Exception, starting: bool, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tracebacks around the sentence hid it; a fault of ours still shows where it happened."""
    life: Any = _Life()
    config: Any = _Config()
    with caplog.at_level("INFO"):
        rank_main.report_failure(life, config, error, starting=starting)
    assert life.words == [{"secondary": False, "plain": plain}]
    assert [bool(record.exc_info) for record in caplog.records] == ([] if plain else [True])


@pytest.mark.parametrize("plain", [False, True])
def test_plain_last_words_carry_the_cause_alone(plain: bool) -> None:
    life = RankLife.__new__(RankLife)
    said: list[Any] = []
    life.send = said.append  # type: ignore[method-assign]
    life.send_failure(0, ValueError("no such weight"), plain=plain)
    (word,) = said
    assert isinstance(word, io_struct.RankFailed) and word.message == "ValueError: no such weight"
    assert ("ValueError" in word.traceback) == (not plain)

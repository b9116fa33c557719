"""Standard error that cannot be written ends nothing; standard output that cannot be written is told."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import os
import signal
import subprocess
import sys

import pytest

import sglang
from sglang.srt.environ import child_environment
from sglang.test.waiting import HANG_GUARD_S

COMMANDS = ["sglang version", "sglang help", "sglang serve --help", "sglang.placement --tp-size 2"]
#: The same programs as they were: what they print goes straight to the streams.
PLAIN = """
import importlib, sys
from sglang.srt.utils import standard_streams
def answered(prog, text):
    sys.stdout.write(text)
    return 0
standard_streams.answered, standard_streams.bear_lost_error_output = answered, lambda: None
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


def ran(command: str, where: str, *, plain: bool = False) -> tuple[int, str, str]:
    """Exit code, output and error output of `python -m COMMAND` with its streams sent elsewhere."""
    program = '-c "$PLAIN" ' + command.replace("sglang ", "sglang.cli ", 1) if plain else f"-m {command}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$PYTHON" {program} {where}'],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        env={**child_environment(), "PYTHON": sys.executable, "PLAIN": PLAIN},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_that_cannot_be_written_is_told_in_one_sentence(command: str) -> None:
    """A disk that is full was a traceback, and a stream that is closed was no word at all."""
    for where, why in (("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        code, _, error = ran(command, where)
        assert code == 1
        assert len(error.splitlines()) == 1
        assert f"error: standard output cannot be written ({why})" in error


def test_the_twin_that_only_prints_ends_otherwise() -> None:
    for where in ("> /dev/full", ">&-"):
        code, _, error = ran("sglang.placement --tp-size 2", where, plain=True)
        assert code != 1 or "Traceback" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_seen_enough_ends_it_quietly(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=HANG_GUARD_S,
            env=child_environment(),
        )
    assert done.stderr == b"" and done.returncode in (-signal.SIGPIPE, 128 + signal.SIGPIPE)


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("sglang version", 0, f"{sglang.__version__}\n"),
        ("sglang fly", 2, ""),
        ("sglang", 2, ""),
        ("sglang serve --no-such-flag", 2, ""),
        ("sglang.launch_server --help", 0, "usage: "),
        ("sglang.launch_server --model-path /no/such/folder", 1, ""),
        ("sglang.placement --pp-size x", 2, ""),
    ],
)
def test_words_that_standard_error_cannot_take_are_lost_and_nothing_else_is(
    command: str, code: int, output: str
) -> None:
    """A start ended before it had begun, at a note that there is a newer spelling."""
    found = ran(command, "2> /dev/full")
    assert found[0] == code and found[1].startswith(output) and bool(found[1]) == bool(output)


def test_the_twin_of_that_ends_at_its_first_word() -> None:
    code, output, _ = ran("sglang.launch_server --help", "2> /dev/full", plain=True)
    assert code != 0 and output == ""

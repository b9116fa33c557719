"""What a lane finds depends neither on how it was started nor on chance."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
RUN = """
import runpy, signal, subprocess, sys
if sys.argv[1] == "with":
    runpy.run_path(sys.argv[2])
code = "import signal as s; print(*[int(s.getsignal(n) is s.SIG_IGN) for n in (s.SIGINT, s.SIGHUP)])"
subprocess.run([sys.executable, "-c", code], check=True)
signal.raise_signal(signal.SIGHUP)
print("goes on")
"""


@pytest.mark.parametrize(("conftest", "ignored"), [("with", "0 0"), ("without", "1 1")])
def test_servers_hear_signals_also_where_the_run_ignores_them(conftest: str, ignored: str) -> None:
    """In the background or under `nohup`, a test that ends a server by such a signal would wait for ever.

    A hang-up still does not end the run itself.
    """
    in_the_background = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    done = subprocess.run(
        [*in_the_background, sys.executable, "-c", RUN, conftest, str(CONFTEST)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [ignored, "goes on"]


def test_examples_follow_from_the_test_and_slowness_is_no_failure() -> None:
    """Otherwise a lane that passed once fails another time over the same tree."""
    settings = hypothesis.settings()
    assert settings.derandomize and settings.deadline is None
    assert hypothesis.HealthCheck.too_slow in settings.suppress_health_check

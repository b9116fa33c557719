"""Owns what holds for every run of a lane: examples of hypothesis, rounds that draft, signals of servers.

The result depends on the tree alone, not on chance, the machine or the shell: examples follow from the test,
and slowness is no failure. For other examples: `pytest --hypothesis-profile=search FILE`.
"""

import os
import signal
from typing import Any

import hypothesis

hypothesis.settings.register_profile("search", hypothesis.settings.get_profile("ci"), derandomize=False)
hypothesis.settings.load_profile("ci")

# Whether a round drafts would follow from times of this machine, and with it how many guesses are right. The
# tests of that choice switch it on.
os.environ.setdefault("SGLANG_SPEC_SKIP_SLOW_DRAFTS", "0")


def _ignore(*_: Any) -> None:
    """Ignores a signal in this process; unlike SIG_IGN, children do not inherit it."""


# Shells start background jobs with SIGINT ignored, and `nohup` starts with SIGHUP ignored. Children inherit
# that, and a server under test would ignore the signal that its test sends.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, _ignore)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

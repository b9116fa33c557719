"""Owns what holds for a run of any lane, however it was started: how hypothesis looks for counter-examples,
and that servers under test hear signals.

A lane judges the tree, not the draw, the machine or the shell: examples follow from the test alone, and slow
is no failure. `pytest --hypothesis-profile=search FILE` draws other examples each time.
"""

import signal
from typing import Any

import hypothesis

hypothesis.settings.register_profile("search", hypothesis.settings.get_profile("ci"), derandomize=False)
hypothesis.settings.load_profile("ci")


def _go_on(*_: Any) -> None:
    """What `nohup` asks for, without asking it of every server that a test starts."""


# Shells start what runs in the background with SIGINT ignored, `nohup` does it with SIGHUP. Children inherit
# that, and a server keeps to it: it would not hear the signal that its test sends.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, _go_on)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

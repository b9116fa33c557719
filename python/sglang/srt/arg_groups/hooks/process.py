"""Draws the seed, once for all processes of a deployment: child processes are handed the result."""

from secrets import randbelow

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.constants import MAX_SEED


def resolve_process(view: ResolvingView) -> None:
    if view.random_seed is None:
        view.declare("process_hook", random_seed=randbelow(MAX_SEED))

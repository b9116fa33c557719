"""Draws what must be the same in every process of a deployment: the seed.

Run last, at the door, once: children are handed the result.
"""

from secrets import randbelow

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.constants import MAX_SEED


def resolve_process(view: ResolvingView) -> None:
    if view.random_seed is None:
        view.declare("process_hook", random_seed=randbelow(MAX_SEED))

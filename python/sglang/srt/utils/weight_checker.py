"""Compares the weights of one runner with what they were; the comparison arrives with weight updates.

Built per runner and called from the scheduler loop, outside any draft scope. So it reports the placement it
was given and must not ask the context for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState

__all__ = ["WeightChecker"]


class WeightChecker:
    """`get_model` is called at check time: a reload may have replaced the model since."""

    def __init__(self, *, get_model: Callable[[], object], ps: ParallelState) -> None:
        self._get_model = get_model
        self._ps = ps

    def _parallelism_info(self) -> ParallelState:
        """Placement of the runner this checker was built for."""
        return self._ps

    def handle(self, action: str) -> NoReturn:
        raise NotImplementedError(
            f"weight check {action!r} arrives with weight updates; "
            "this server loads its weights once, at start"
        )

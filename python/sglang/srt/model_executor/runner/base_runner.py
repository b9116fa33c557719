"""Owns what a runner is: it says whether it can run some work, and runs it.

Held by the model runner and by draft workers, which take the first that can. It must not plan requests or
sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs

Work = TypeVar("Work")
Result = TypeVar("Result")


class BaseRunner(ABC, Generic[Work, Result]):
    """Runs work of one kind; `graphs` are those that it replays, None for a runner without."""

    graphs: CapturedGraphs | None = None

    @abstractmethod
    def can_run(self, work: Work) -> bool:
        """Whether this runner serves such work; decided from numbers that all ranks agree on."""

    @abstractmethod
    def run(self, work: Work) -> Result:
        """Run it, all ranks together."""

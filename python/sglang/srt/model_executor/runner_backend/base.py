"""Owns what every back end that records graphs offers: capture, replay, drop, and the group it captures with.

Made by graph runners, one for each generation of graphs, inside the scope in which they are recorded. It must
not know sizes of batches, padding or models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sglang.srt.distributed.group_coordinator import GroupCoordinator
from sglang.srt.runtime_context import get_parallel

#: What a recorded function gives, by name.
Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """Which recorded graph: so many requests, and what else tells graphs of one size apart."""

    size: int
    variant: str = ""


class GraphBackend(ABC):
    """Records functions that take no arguments: all that they read and write lies at fixed addresses."""

    #: Runs before a capture, so that libraries have made their handles and workspaces.
    warm_ups = 2

    def __init__(self) -> None:
        parallel = get_parallel()
        #: The ranks that capture together: those of the tensor group of the scope in force; None: this one.
        self.tp_group: GroupCoordinator | None = parallel.tp_group if parallel.tp_size > 1 else None

    def barrier(self) -> None:
        """Wait for all ranks that capture together."""
        if self.tp_group is not None:
            self.tp_group.barrier()

    @property
    def shared_bytes(self) -> int | None:
        """Memory of what recorded code makes, which all graphs of the process share; None: not known."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Open while several graphs are captured that share a stream and memory."""

    @abstractmethod
    def capture(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        """Record `fn`; its outputs are what `replay` gives. Raises what the function or the device raises."""

    @abstractmethod
    def replay(self, key: ShapeKey) -> Outputs:
        """Run a recorded graph. Its outputs hold until the next replay of any graph that shares memory."""

    @abstractmethod
    def drop(self) -> None:
        """Free all graphs. To be called before the process groups that they use are destroyed."""

"""Owns the graphs of one runner: recorded for some sizes, replayed, recorded again, dropped.

Held by graph runners, which bring the function, the static buffers and what fills them. It must not know what
the function computes. All ranks that capture together call it alike: there are barriers in it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.distributed.group_coordinator import GroupCoordinator, counted_collectives
from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs, ShapeKey
from sglang.srt.model_executor.runner_utils.addresses import AddressTable
from sglang.srt.model_executor.runner_utils.capture_mode import capture_mode
from sglang.srt.model_executor.runner_utils.sizes import size_for
from sglang.srt.runtime_context import get_parallel

_CURES = (
    "a smaller --mem-fraction-static, a smaller --cuda-graph-max-bs-decode, or "
    "--cuda-graph-backend-decode disabled"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is recorded: `prepare(size)` makes all inputs padding, `forward(size)` reads nothing but them.

    `scope` is entered round the forward when it is recorded again: that happens outside the scope in which
    the model of a draft was built, and a model runs in no other.
    """

    name: str
    prepare: Callable[[int], None]
    forward: Callable[[int], Outputs]
    model: nn.Module
    make_backend: Callable[[], GraphBackend]
    scope: Callable[[], AbstractContextManager[None]] = nullcontext


class CapturedGraphs:
    """One graph a size. Made empty; `capture` records them in the scope that is open then.

    Without `pads` a graph serves batches of its very size only.
    """

    def __init__(self, recipe: Recipe, sizes: Sequence[int], *, pads: bool = True) -> None:
        self.recipe = recipe
        self.sizes = sorted(sizes)
        self._pads = pads
        self._backend: GraphBackend | None = None
        self._collectives: dict[int, Counter[tuple[GroupCoordinator, str]]] = {}  # of each size
        self._addresses: AddressTable | None = None

    @property
    def is_captured(self) -> bool:
        """Whether there are graphs to replay."""
        return self._backend is not None

    @property
    def shared_bytes(self) -> int | None:
        """Memory that these graphs share with all others of the process; None where it is not known."""
        return None if self._backend is None else self._backend.shared_bytes

    def size_for(self, num_requests: int) -> int | None:
        """The size that serves so many requests; None where there is no graph for them."""
        if not self.is_captured or (num_requests not in self.sizes and not self._pads):
            return None
        return size_for(self.sizes, num_requests)

    def capture(self) -> None:
        """Record all sizes, the largest first: later graphs fit into what it leaves free.

        `RuntimeError` that names size and cures when it fails; no graph is left then.
        """
        self._capture(nullcontext)

    def recapture(self) -> None:
        """Record again, outside any draft scope: barriers are those of the target's tensor group."""
        self._capture(self.recipe.scope)

    def replay(self, size: int) -> Outputs:
        """Run the graph of a size. The outputs hold until the next replay of any graph of this process."""
        if self._backend is None:
            raise RuntimeError(f"{self.recipe.name}: no graph is captured; call capture() first")
        for (group, operation), count in self._collectives[size].items():
            group.calls[operation] += count
        return self._backend.replay(ShapeKey(size))

    def check_addresses(self) -> None:
        """After a weight update without recapture: `RuntimeError` for a weight that moved."""
        if self._addresses is not None:
            self._addresses.check(self.recipe.model)

    def drop(self) -> None:
        """Free all graphs; before the process groups are destroyed, and before another generation."""
        backend, self._backend, self._addresses = self._backend, None, None
        if backend is not None:
            backend.drop()

    def _capture(self, scope: Callable[[], AbstractContextManager[None]]) -> None:
        self.drop()
        backend = self.recipe.make_backend()
        with torch.inference_mode(), backend.session(), capture_mode():
            for size in reversed(self.sizes):
                try:
                    self._capture_size(backend, size, scope)
                except Exception as error:
                    backend.drop()
                    raise RuntimeError(
                        f"{self.recipe.name}: capturing a graph of {size} requests failed: {error}; try "
                        f"{_CURES}"
                    ) from error
        self._backend = backend
        self._addresses = AddressTable(self.recipe.model)

    def _capture_size(
        self, backend: GraphBackend, size: int, scope: Callable[[], AbstractContextManager[None]]
    ) -> None:
        def forward() -> Outputs:
            with scope():
                return self.recipe.forward(size)

        self.recipe.prepare(size)
        for _ in range(backend.warm_ups):
            backend.synchronize()
            backend.barrier()
            forward()
        backend.synchronize()
        backend.barrier()
        with counted_collectives() as collectives:
            backend.capture(ShapeKey(size), forward)
        self._collectives[size] = collectives


def recapture_all(graphs: Iterable[CapturedGraphs | None]) -> None:
    """Record the graphs of a rank again after a weight update: those of the target first, then of drafts.

    Every rank of the target's tensor group calls it, outside any draft scope. All old graphs go before the
    first new one is made: two generations may not fit. A runner without graphs (None, or none captured) is
    skipped and touches no barrier. `RuntimeError` inside a scope.
    """
    get_parallel().refuse_open_scope("recapture_all()")
    present = [entry for entry in graphs if entry is not None and entry.is_captured]
    for entry in present:
        entry.drop()
    is_frozen = gc.get_freeze_count() > 0  # a rank's start leaves what is there out of collections
    gc.unfreeze()
    gc.collect()
    for entry in present:
        entry.recapture()
    if is_frozen:
        gc.freeze()

"""Owns the graphs of a CPU: lists of kernel calls that replay without Python, and what lies between them.

Chosen as `cpu`. A call of a compiled kernel goes into a list; any other operation that writes something is
run again from Python, and a line names it. It must not keep more memory than what recorded code has alive at
one time: what it makes lies in an arena that all graphs of the process share.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.distributed.group_coordinator import GroupCoordinator
from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs, ShapeKey
from sglang.srt.model_executor.runner_utils.arena import Arena
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.model_executor.runner_utils.recorded_step import (
    RecordedStep,
    RefuseHostReads,
    is_tensor,
    leaves_unwritten,
    made_by,
    operation_name,
    refuse_host_read,
    writes_arguments,
)

logger = logging.getLogger(__name__)


@dataclass
class CpuGraph:
    """One recorded function: its parts in order, what it gives, and by name what runs from Python."""

    #: Kernel lists, steps and exchanges: all have `play` and `drop`.
    parts: list[Any] = field(default_factory=list)
    outputs: Outputs = field(default_factory=dict)
    from_python: Counter[str] = field(default_factory=Counter)

    def play(self) -> None:
        for part in self.parts:
            part.play()


@dataclass(frozen=True)
class RecordedExchange:
    """An exchange between the ranks that recorded together; a peer that is gone is told as eagerly."""

    part: Any  # a kernel list with an exchange in it, or a step that is one
    group: GroupCoordinator

    def play(self) -> None:
        with self.group.translated_errors("an exchange of a recorded step"):
            self.part.play()

    def drop(self) -> None:
        self.part.drop()


class _ArenaDevice:
    """What the process-wide pool of graphs is on a CPU."""

    def graph_pool_handle(self) -> object:
        return Arena()


class CpuGraphBackend(GraphBackend):
    """Records in the calling thread."""

    warm_ups = 0  # kernels have neither handles nor workspaces to make

    def __init__(self) -> None:
        super().__init__()
        kernels = compiled_kernels()
        assert kernels is not None  # the flag is refused without them
        self._kernels = kernels
        arena = get_or_create_global_graph_memory_pool(_ArenaDevice())
        assert isinstance(arena, Arena)  # one kind of device a process
        self.arena = arena
        self.graphs: dict[ShapeKey, CpuGraph] = {}

    @property
    def shared_bytes(self) -> int:
        return self.arena.bytes

    def synchronize(self) -> None:
        return None

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        graph = CpuGraph()
        recorder = _Recorder(graph, self._kernels.record, self.arena, self.tp_group)
        with recorder, RefuseHostReads():
            results = dict(fn())
        # They hold until the next replay of any graph, so other graphs may take their memory.
        graph.outputs = {name: self.arena.unowned(tensor) for name, tensor in results.items()}
        self.graphs[key] = graph
        if graph.from_python:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(graph.from_python.items()))
            logger.info("A graph of %d requests runs from Python, slower: %s", key.size, named)

    def replay(self, key: ShapeKey) -> Outputs:
        graph = self.graphs[key]
        # Entering it costs as much as several kernels; a rank's loop is in it already.
        with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
            graph.play()
        return graph.outputs

    def drop(self) -> None:
        for graph in self.graphs.values():
            for part in graph.parts:
                part.drop()
        self.graphs.clear()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types here
    """Writes down every operation but views, which share the memory of what they look at."""

    def __init__(
        self, graph: CpuGraph, record: ModuleType, arena: Arena, group: GroupCoordinator | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._arena, self._group = graph, arena, group
        self._make_list, self._num_recorded = record.CallList, record.num_recorded
        self._open_list = ExitStack()  # the kernel list that is being recorded
        self._is_recording = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled around a recorder; to see to that, torch would import its compiler."""
        return False

    def __exit__(self, *error: Any) -> None:
        self._close_list()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "sgl_kernel":
            return self._record_kernel(func, args, kwargs)
        refuse_host_read(func, args, kwargs)
        result = func(*args, **kwargs)
        if leaves_unwritten(func):
            return self._arena.like(result)
        made = made_by(args, kwargs, result)
        if writes_arguments(func) or made:
            self._close_list()
            self._graph.parts.append(RecordedStep(func, args, kwargs, made))
            if func.namespace == "c10d":
                self._mark_exchange()
            self._graph.from_python[operation_name(func)] += 1
        return result

    def _record_kernel(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._is_recording:
            calls = self._make_list()
            self._open_list.enter_context(calls.recording())
            self._is_recording = True
            self._graph.parts.append(calls)
        before = self._num_recorded()
        result = func(*args, **kwargs)
        if self._num_recorded() == before and any(
            v.numel() for v in tree_leaves((args, kwargs)) if is_tensor(v)
        ):
            raise RuntimeError(f"{func} leaves no call in the list while a graph is recorded")
        if operation_name(func).startswith("shm_"):
            self._mark_exchange()
        return result

    def _mark_exchange(self) -> None:
        """The last part exchanges something with the ranks that record together."""
        part = self._graph.parts[-1]
        if self._group is not None and not isinstance(part, RecordedExchange):
            self._graph.parts[-1] = RecordedExchange(part, self._group)

    def _close_list(self) -> None:
        self._open_list.close()
        self._is_recording = False

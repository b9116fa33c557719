"""Owns a back end that records torch operations and replays them as a device graph would, lies included.

Read by tests of graph runners. Addresses and Python numbers are baked at capture; a replay first spoils every
intermediate tensor of every graph that shares memory, as another graph of the pool may; whoever asks the
device for a value while recording is refused by name. It must not be more forgiving than a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs, ShapeKey
from sglang.srt.model_executor.runner_utils.recorded_step import (
    RecordedStep,
    RefuseHostReads,
    leaves_unwritten,
    made_by,
    refuse_host_read,
    writes_arguments,
)


@dataclass
class Tape:
    """One recorded function: its steps, all tensors that they made, and the ones that it gives."""

    steps: list[RecordedStep] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    outputs: Outputs = field(default_factory=dict)

    def spoil(self) -> None:
        """Fill all that the recorded code made with numbers that nobody wants."""
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(True if tensor.dtype is torch.bool else -7)

    def play(self) -> None:
        """Run every step into the tensors that it made at capture."""
        for step in self.steps:
            step.play()


@dataclass
class TapePool:
    """The memory that tapes share: a replay of one spoils what all of them made."""

    tapes: list[Tape] = field(default_factory=list)


class TapeBackend(GraphBackend):
    """Records on CPU. `pool` is shared by the back ends whose graphs may spoil each other."""

    def __init__(self, pool: TapePool | None = None) -> None:
        super().__init__()
        self.pool = pool or TapePool()
        self.tapes: dict[ShapeKey, Tape] = {}
        self.replays: list[ShapeKey] = []

    def synchronize(self) -> None:
        return None

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        tape = Tape()
        with torch.inference_mode(), _Recorder(tape), RefuseHostReads():
            tape.outputs = dict(fn())
        self.tapes[key] = tape
        self.pool.tapes.append(tape)

    def replay(self, key: ShapeKey) -> Outputs:
        self.replays.append(key)
        with torch.inference_mode():
            for tape in self.pool.tapes:
                tape.spoil()
            self.tapes[key].play()
        return self.tapes[key].outputs

    def drop(self) -> None:
        for tape in self.tapes.values():
            self.pool.tapes.remove(tape)
        self.tapes.clear()


class _Recorder(TorchDispatchMode):
    """Writes down every operation but views, which share the memory of what they look at."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        result = func(*args, **kwargs)
        made = made_by(args, kwargs, result)
        self.tape.made += [value for _, value in made]
        if not leaves_unwritten(func) and (writes_arguments(func) or made):
            self.tape.steps.append(RecordedStep(func, args, kwargs, made))
        return result

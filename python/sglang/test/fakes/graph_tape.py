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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.srt.model_executor.runner_backend.base import GraphBackend, Outputs, ShapeKey

#: Methods that hand a value to the host, some of them without passing the dispatcher.
_HOST_READS = frozenset(
    {"tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "__array__"}
)
#: Operations whose result has a shape that depends on values, or that give a value to the host.
_HOST_OPS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
)
#: Operations that leave what they return unwritten.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class HostReadError(RuntimeError):
    """Recorded code asked for a value, which a graph cannot give."""


@dataclass(frozen=True)
class Step:
    """One operation with the very tensors that it saw; `results` are (place, tensor) of what it made."""

    operation: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[tuple[int, torch.Tensor]]

    def play(self) -> None:
        """Run it into the tensors that it made at capture; a collective is waited for."""
        leaves = tree_leaves(self.operation(*self.args, **self.kwargs))
        for place, tensor in self.results:
            tensor.copy_(leaves[place])
        for work in leaves:
            if isinstance(work, torch.ScriptObject):
                work.wait()  # type: ignore[attr-defined]  # found at run time


@dataclass
class Tape:
    """One recorded function: its steps, all tensors that they made, and the ones that it gives."""

    steps: list[Step] = field(default_factory=list)
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
        with torch.inference_mode(), _Recorder(tape), _RefuseHostReads():
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


class _RefuseHostReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and any(_is_tensor(value) for value in args):
            raise HostReadError(f"Tensor.{name} reads a value of the device while a graph is recorded")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes down every operation but views, which share the memory of what they look at."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        given = [value for value in tree_leaves((args, kwargs)) if _is_tensor(value)]
        if name in _HOST_OPS or (name == "index" and any(v.dtype is torch.bool for v in given[1:])):
            raise HostReadError(f"{func} needs a value of the device while a graph is recorded")
        if name == "lift_fresh":
            raise HostReadError("torch.tensor(...) copies from the host while a graph is recorded")
        result = func(*args, **kwargs)
        memory = {_memory(value) for value in given}
        made = [
            (place, value)
            for place, value in enumerate(tree_leaves(result))
            if _is_tensor(value) and _memory(value) not in memory
        ]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        writes = writes or func.namespace == "c10d"  # collectives do not declare what they write
        self.tape.made += [value for _, value in made]
        if name not in _UNWRITTEN and (writes or made):
            self.tape.steps.append(Step(func, args, kwargs, made))
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common; a packed weight has no address and is its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)

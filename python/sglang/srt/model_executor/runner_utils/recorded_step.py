"""Owns what a recorder on the CPU sees of one torch operation, and how the operation is run again.

Read by back ends that record on a CPU. Views need no step, because they share the memory of what they look
at. An operation that reads a value to the host is refused by name: a replay would go by the value of the
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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
class RecordedStep:
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

    def drop(self) -> None:
        """Nothing of it lies elsewhere."""


class RefuseHostReads(TorchFunctionMode):
    """Refuses the methods that read a value, also those that the dispatcher does not see on a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and any(is_tensor(value) for value in args):
            raise HostReadError(f"Tensor.{name} reads a value of the device while a graph is recorded")
        return func(*args, **(kwargs or {}))


def operation_name(operation: Any) -> str:
    """The name without namespace and overload."""
    name: str = operation._schema.name
    return name.rpartition("::")[2]


def leaves_unwritten(operation: Any) -> bool:
    """Whether it only takes memory."""
    return operation_name(operation) in _UNWRITTEN


def refuse_host_read(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """`HostReadError` for an operation that needs a value, or brings one from the host."""
    name = operation_name(operation)
    masks = [v for v in tree_leaves((args, kwargs))[1:] if is_tensor(v) and v.dtype is torch.bool]
    if name in _HOST_OPS or (name == "index" and masks):
        raise HostReadError(f"{operation} needs a value of the device while a graph is recorded")
    if name == "lift_fresh":
        raise HostReadError("torch.tensor(...) copies from the host while a graph is recorded")


def made_by(args: Sequence[Any], kwargs: dict[str, Any], result: object) -> list[tuple[int, torch.Tensor]]:
    """(place, tensor) of every result that shares no memory with an argument."""
    given = {_memory(value) for value in tree_leaves((args, kwargs)) if is_tensor(value)}
    return [
        (place, value)
        for place, value in enumerate(tree_leaves(result))
        if is_tensor(value) and _memory(value) not in given
    ]


def writes_arguments(operation: Any) -> bool:
    """Whether it writes into what it is given; collectives do not declare what they write."""
    declared = any(a.alias_info is not None and a.alias_info.is_write for a in operation._schema.arguments)
    return declared or operation.namespace == "c10d"


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common; a packed weight has no address and is its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)

"""Owns the flags of one forward: what a decoder, a collective or a padding decision tells the layers below.

Read through `get_forward()`, never kept: a reset replaces the object. Graph-visible flags are plain,
process-wide slots that trace inside compiled code; context-local flags start at their default in every new
thread and must not be read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.runtime_context.scopes import Scope, ScopeStack, refuse_copy, scope_function

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionInputs", "ForwardFlags"]

T = TypeVar("T")

#: (whose values these are, the values): a reset makes a new owner, so no thread sees values of the old one.
_local_values: ContextVar[tuple[object, dict[str, Any]]] = ContextVar("forward_flags", default=(None, {}))


class AttentionInputs(Protocol):
    """Inputs of attention that a layer left for the communicator to fetch."""

    def fetch_qkv_latent(self) -> torch.Tensor: ...


class _Local(Generic[T]):
    """Declares a context-local flag by its default."""

    def __init__(self, default: T) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, flags: object, owner: type) -> T:
        whose, values = _local_values.get()
        value: T = values.get(self._name, self.default) if whose is flags else self.default
        return value


class ForwardFlags:
    """Reads are attributes; writes go through `scoped` (for a block) or `set` (until the next write)."""

    _scopes: ScopeStack

    # Graph-visible.
    attn_input_scattered: bool = False
    is_extend_in_batch: bool = False
    fuse_mlp_allreduce: bool = False
    mlp_reduce_scatter: bool = False
    flashinfer_trtllm_bypass: bool = False
    # Sizes of the rows that attention-DP replicas gather; `layers/dp_attention.py` writes and explains them.
    dp_global_buffer_len: int | None = None
    dp_local_buffer_len: int | None = None
    dp_max_padding: bool = False
    dp_global_num_tokens: list[int] | None = None

    # Context-local: whether side streams may be used, and where the expert runner writes when the caller
    # brings the buffer.
    multi_stream = _Local(False)
    moe_output_buffer = _Local["torch.Tensor | None"](None)
    attn_inputs = _Local[AttentionInputs | None](None)

    def __init__(self) -> None:
        vars(self).update(_GRAPH_VISIBLE, _scopes=ScopeStack("get_forward()", vars(self)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"forward flags are not assigned: use scoped({name}=...) for a block or set({name!r}, ...)"
        )

    def __reduce__(self) -> NoReturn:
        refuse_copy("ForwardFlags", "get_forward()")

    def set(self, name: str, value: object) -> None:
        """Write one flag until the next write or reset."""
        _refuse_unknown([name])
        if name in _CONTEXT_LOCAL:
            self._write_local({name: value})
        else:
            object.__setattr__(self, name, value)

    @scope_function
    def scoped(self, **flags: object) -> Iterator[None]:
        """Write flags for the length of a block; all names are checked before the first is written."""
        _refuse_unknown(list(flags))
        local = {name: value for name, value in flags.items() if name in _CONTEXT_LOCAL}
        before = {name: getattr(self, name) for name in local}
        self._write_local(local)
        try:
            with Scope(self._scopes, {name: value for name, value in flags.items() if name not in local}):
                yield
        finally:
            self._write_local(before)

    def _write_local(self, flags: dict[str, Any]) -> None:
        if flags:
            owner, values = _local_values.get()
            _local_values.set((self, {**(values if owner is self else {}), **flags}))


_CONTEXT_LOCAL = frozenset(name for name, flag in vars(ForwardFlags).items() if isinstance(flag, _Local))
_GRAPH_VISIBLE = {
    name: getattr(ForwardFlags, name) for name in ForwardFlags.__annotations__ if not name.startswith("_")
}


def _refuse_unknown(names: list[str]) -> None:
    declared = [*_GRAPH_VISIBLE, *sorted(_CONTEXT_LOCAL)]
    for name in names:
        if name not in declared:
            near = nearest(name, declared) or f"; declared: {', '.join(declared)}"
            raise ValueError(f"unknown forward flag {name!r}{near}")

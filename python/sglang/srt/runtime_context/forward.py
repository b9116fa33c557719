"""Owns the flags of one forward: what a decoder, a collective or a padding decision tells the layers below
it.

Read through ``get_forward()``, never kept. Two kinds: graph-visible flags are plain, process-wide slots
that trace inside compiled code; context-local flags start at their default in every new thread and must not
be read there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from sglang.srt.runtime_context.scopes import Scope, ScopeStack, refuse_copy, scope_function

__all__ = ["ForwardFlags"]

#: Graph-visible, process-wide. The last four are the sizes of the gathered attention-DP buffer; they stay
#: until the next write.
_GRAPH_VISIBLE: dict[str, Any] = {
    "attn_input_scattered": False,
    "is_extend_in_batch": False,
    "fuse_mlp_allreduce": False,
    "mlp_reduce_scatter": False,
    "flashinfer_trtllm_bypass": False,
    "dp_global_buffer_len": None,
    "dp_local_buffer_len": None,
    "dp_max_padding": False,
    "dp_global_num_tokens": None,
}

#: Context-local.
_LOCAL: dict[str, Any] = {"multi_stream": False, "moe_output_buffer": None, "attn_inputs": None}

#: (whose values these are, the values): a reset makes a new owner, so no thread sees values of the old one.
_local_values: ContextVar[tuple[object, dict[str, Any]]] = ContextVar("forward_flags", default=(None, {}))


class ForwardFlags:
    """Reads are attributes; writes go through ``scoped`` (for a block) or ``set`` (until the next write)."""

    _scopes: ScopeStack
    attn_input_scattered: bool
    is_extend_in_batch: bool
    fuse_mlp_allreduce: bool
    mlp_reduce_scatter: bool
    flashinfer_trtllm_bypass: bool
    dp_global_buffer_len: int | None
    dp_local_buffer_len: int | None
    dp_max_padding: bool
    dp_global_num_tokens: list[int] | None

    def __init__(self) -> None:
        for name, default in _GRAPH_VISIBLE.items():
            object.__setattr__(self, name, default)
        object.__setattr__(self, "_scopes", ScopeStack("get_forward()", self.__dict__))

    @property
    def multi_stream(self) -> bool:
        """Side streams may be used in this block."""
        return bool(self._local("multi_stream"))

    @property
    def moe_output_buffer(self) -> Any:
        """Where the expert runner writes, when the caller brings the buffer."""
        return self._local("moe_output_buffer")

    @property
    def attn_inputs(self) -> Any:
        """Inputs of attention that a layer left for the communicator to fetch."""
        return self._local("attn_inputs")

    def _local(self, name: str) -> Any:
        owner, values = _local_values.get()
        return values.get(name, _LOCAL[name]) if owner is self else _LOCAL[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"forward flags are not assigned: use scoped({name}=...) for a block or set({name!r}, ...)"
        )

    def __reduce__(self) -> NoReturn:
        refuse_copy("ForwardFlags", "get_forward()")

    def set(self, name: str, value: Any) -> None:
        """Write one flag until the next write or reset."""
        self._refuse_unknown([name])
        if name in _LOCAL:
            self._write_local({name: value})
        else:
            object.__setattr__(self, name, value)

    @scope_function
    def scoped(self, **flags: Any) -> Iterator[None]:
        """Write flags for the length of a block; all names are checked before the first is written."""
        self._refuse_unknown(list(flags))
        local = {name: value for name, value in flags.items() if name in _LOCAL}
        before = {name: self._local(name) for name in local}
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

    @staticmethod
    def _refuse_unknown(names: list[str]) -> None:
        declared = [*_GRAPH_VISIBLE, *_LOCAL]
        for name in names:
            if name not in declared:
                near = difflib.get_close_matches(name, declared, n=3) or declared
                raise ValueError(f"unknown forward flag {name!r}; nearest: {', '.join(near)}")

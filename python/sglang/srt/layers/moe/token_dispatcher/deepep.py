"""Modes of the DeepEP buffer. Creating one and dispatching through it come with expert parallelism.

Read by the expert dispatcher. Imports without the package `deep_ep`. The buffer and its sizes are among the
context's resources and must not be kept here.
"""

from __future__ import annotations

from typing import NoReturn

from sglang.srt.runtime_context import get_resources
from sglang.srt.runtime_context.resources import DeepEPDispatchMode, DeepEPState

__all__ = ["DeepEPBuffer", "DeepEPDispatchMode"]


class DeepEPBuffer:
    """The buffer of this process, which has another layout in each of two modes."""

    @classmethod
    def _state(cls) -> DeepEPState:
        return get_resources().deepep

    @classmethod
    def get_deepep_buffer(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "DeepEP buffers arrive with expert parallelism; use --moe-a2a-backend none until then"
        )

    @classmethod
    def set_dispatch_mode_as_normal(cls) -> None:
        cls._state().dispatch_mode = DeepEPDispatchMode.NORMAL

    @classmethod
    def set_dispatch_mode_as_low_latency(cls) -> None:
        """Clean the buffer once after the normal mode, which leaves data where low-latency counters lie."""
        state = cls._state()
        if state.dispatch_mode is DeepEPDispatchMode.NORMAL and state.buffer is not None:
            if not state.buffer.low_latency_mode:
                raise RuntimeError(
                    "this DeepEP buffer was made without low-latency room; make it with low_latency_mode"
                )
            state.buffer.clean_low_latency_buffer(
                state.num_max_dispatch_tokens_per_rank, state.hidden_size, state.num_experts
            )
        state.dispatch_mode = DeepEPDispatchMode.LOW_LATENCY

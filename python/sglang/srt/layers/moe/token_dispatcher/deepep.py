"""Modes of the DeepEP buffer. Creating a buffer and dispatching through it arrive with expert parallelism.

Read by the expert dispatcher. Imports without the `deep_ep` package; the buffer and what it was sized for
live in the context's resources, must not be kept here.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.runtime_context import get_resources
from sglang.srt.runtime_context.resources import DeepEPDispatchMode, DeepEPState

__all__ = ["DeepEPBuffer", "DeepEPDispatchMode"]


class DeepEPBuffer:
    """The one buffer of this process, used in either of two modes that lay it out differently."""

    @classmethod
    def _state(cls) -> DeepEPState:
        return get_resources().deepep

    @classmethod
    def get_deepep_buffer(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "DeepEP buffers arrive with expert parallelism; use --moe-a2a-backend none until then"
        )

    @classmethod
    def set_dispatch_mode_as_normal(cls) -> None:
        cls._state().dispatch_mode = DeepEPDispatchMode.NORMAL

    @classmethod
    def set_dispatch_mode_as_low_latency(cls) -> None:
        """Coming from the normal mode the buffer holds foreign data where low-latency counters lie: clean
        it once."""
        state = cls._state()
        if state.dispatch_mode is DeepEPDispatchMode.NORMAL and state.buffer is not None:
            cls._clean(state)
        state.dispatch_mode = DeepEPDispatchMode.LOW_LATENCY

    @staticmethod
    def _clean(state: DeepEPState) -> None:
        if not state.buffer.low_latency_mode:
            raise RuntimeError(
                "this DeepEP buffer was made without low-latency room; make it with low_latency_mode"
            )
        state.buffer.clean_low_latency_buffer(
            state.num_max_dispatch_tokens_per_rank, state.hidden_size, state.num_experts
        )

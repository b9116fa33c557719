"""The level of detail of request traces. Writing traces comes later.

Read by code that would open a span. The level is one of the context's resources, taken from
`SGLANG_TRACE_LEVEL` at the first read and kept until it is set or the context is reset.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_trace_level", "set_global_trace_level"]


def get_global_trace_level() -> int:
    resources = get_resources()
    if resources.trace_level is None:
        resources.trace_level = envs.SGLANG_TRACE_LEVEL.get()
    return resources.trace_level


def set_global_trace_level(level: int) -> None:
    if level < 0:
        raise ValueError(f"a trace level is 0 (nothing) or more, got {level}")
    get_resources().trace_level = level

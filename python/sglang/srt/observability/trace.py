"""How much detail request traces have. Writing traces arrives with the observability work.

Read by whoever would open a span. The level lives in the context's resources: seeded from
`SGLANG_TRACE_LEVEL` at the first ask, kept until it is set or the context is reset.
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

"""Owns the named slots of process-level handles: streams, buffers, pools, recorders, stores.

Read through `get_resources()` by the modules that create such a handle. Must not create one itself,
except the keyed get-or-create of streams and buffers; all of them end together with `reset_context`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.runtime_context.flags import FlagGroupBase

__all__ = ["DeepEPDispatchMode", "DeepEPState", "Resources"]


class DeepEPDispatchMode(enum.Enum):
    """Which half of the shared expert buffer is in use."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


@dataclass
class DeepEPState:
    """The expert dispatcher's buffer and what it was sized for."""

    buffer: Any = None
    dispatch_mode: DeepEPDispatchMode | None = None
    hidden_size: int | None = None
    num_max_dispatch_tokens_per_rank: int | None = None
    num_experts: int | None = None


class Resources(FlagGroupBase):
    """One slot per handle; `override` swaps some for the length of a block."""

    _accessor: ClassVar[str] = "get_resources()"

    graph_memory_pool: Any = None
    expert_distribution_recorder: Any = None
    expert_location_metadata: Any = None
    indexer_capturer: Any = None
    experts_capturer: Any = None
    tcp_store: Any = None
    trace_level: int | None = None
    streams: dict[str, Any]
    buffers: dict[str, Any]
    deepep: DeepEPState

    def __init__(self) -> None:
        super().__init__()
        self.streams = {}
        self.buffers = {}
        self.deepep = DeepEPState()

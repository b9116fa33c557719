"""Owns the slots of process-wide handles: streams, buffers, pools, recorders, stores.

Read through `get_resources()` by the modules that create such a handle. Must not create one itself;
`reset_context` drops all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sglang.srt.runtime_context.flags import FlagGroupBase

if TYPE_CHECKING:
    import torch

__all__ = ["DeepEPDispatchMode", "DeepEPState", "ExpertRecorder", "Resources"]


class ExpertRecorder(Protocol):
    """Counts how often each expert is chosen."""

    @property
    def recording(self) -> bool: ...

    def start_record(self) -> None: ...

    def dump_record(self) -> None: ...


class DeepEPDispatchMode(enum.Enum):
    """Which half of the shared expert buffer is in use."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


class DeepEPHandle(Protocol):
    """What is used of `deep_ep.Buffer`."""

    low_latency_mode: bool

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int | None, hidden: int | None, num_experts: int | None
    ) -> None: ...


@dataclass
class DeepEPState:
    """The buffer of the expert dispatcher and the sizes that it was made for."""

    buffer: DeepEPHandle | None = None
    dispatch_mode: DeepEPDispatchMode | None = None
    hidden_size: int | None = None
    num_max_dispatch_tokens_per_rank: int | None = None
    num_experts: int | None = None


class Resources(FlagGroupBase):
    """One slot per handle; `override` replaces some for a block."""

    _accessor: ClassVar[str] = "get_resources()"

    graph_memory_pool: object = None
    expert_distribution_recorder: ExpertRecorder | None = None
    expert_location_metadata: object = None
    indexer_capturer: object = None
    experts_capturer: object = None
    tcp_store: torch.distributed.Store | None = None
    trace_level: int | None = None
    streams: dict[str, torch.Stream]
    buffers: dict[str, Any]
    deepep: DeepEPState

    def __init__(self) -> None:
        super().__init__()
        self.streams = {}
        self.buffers = {}
        self.deepep = DeepEPState()

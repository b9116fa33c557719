"""Where each expert is placed in this deployment. Computing a placement arrives with expert load balancing.

Read by expert layers and weight loading. The placement lives in the context's resources and is stated once.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_expert_location_metadata", "set_global_expert_location_metadata"]


def get_global_expert_location_metadata() -> Any | None:
    """The placement in force, or None where experts lie in their own order."""
    return get_resources().expert_location_metadata


def set_global_expert_location_metadata(metadata: Any) -> None:
    """State the placement. A second one would move experts under weights that are loaded already."""
    resources = get_resources()
    if resources.expert_location_metadata is not None:
        raise AssertionError(
            "the expert placement of this process is stated already; reset_context() drops it"
        )
    resources.expert_location_metadata = metadata

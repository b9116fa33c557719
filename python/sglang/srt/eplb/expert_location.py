"""Where each expert is placed in this deployment. Computing a placement comes with expert load balancing.

Read by expert layers and weight loading. The placement is one of the context's resources and is set once.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_expert_location_metadata", "set_global_expert_location_metadata"]


def get_global_expert_location_metadata() -> object:
    """The placement in force; None when experts are in the order of the checkpoint."""
    return get_resources().expert_location_metadata


def set_global_expert_location_metadata(metadata: object) -> None:
    """Set the placement, once: weights are loaded by it."""
    resources = get_resources()
    if resources.expert_location_metadata is not None:
        raise AssertionError(
            "the expert placement of this process is stated already; reset_context() drops it"
        )
    resources.expert_location_metadata = metadata

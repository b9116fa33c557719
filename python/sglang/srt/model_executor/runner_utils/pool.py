"""Owns access to the memory pool that all recorded graphs of this process share.

Read by graph runners. The handle lives in the context's resources; a runner must not keep it.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_graph_memory_pool", "get_or_create_global_graph_memory_pool"]


def get_global_graph_memory_pool() -> object | None:
    """The shared pool, or None before the first capture."""
    pool: object | None = get_resources().graph_memory_pool
    return pool


class GraphDevice(Protocol):
    """The part of a device module (`torch.cuda`, for example) that makes pools."""

    def graph_pool_handle(self) -> object: ...


def get_or_create_global_graph_memory_pool(device_module: GraphDevice) -> object:
    """The shared pool; the device module makes it the first time."""
    resources = get_resources()
    if resources.graph_memory_pool is None:
        resources.graph_memory_pool = device_module.graph_pool_handle()
    return resources.graph_memory_pool

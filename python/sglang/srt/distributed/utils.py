"""Owns the access to the shared key-value store of the ranks.

Must not hold it: it is one of the context's resources and ends with `reset_context`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_resources

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["get_global_tcp_store", "set_global_tcp_store"]


def get_global_tcp_store() -> torch.distributed.Store | None:
    """The store through which ranks exchange small facts; None when none was set."""
    return get_resources().tcp_store


def set_global_tcp_store(store: torch.distributed.Store | None) -> None:
    get_resources().tcp_store = store

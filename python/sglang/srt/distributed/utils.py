"""Owns the access to the shared key-value store of the ranks.

Must not hold it: it is one of the context's resources and ends with `reset_context`.
"""

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_tcp_store", "set_global_tcp_store"]


def get_global_tcp_store() -> Any | None:
    """The store through which ranks exchange small facts, or None when nobody installed one."""
    return get_resources().tcp_store


def set_global_tcp_store(store: Any) -> None:
    get_resources().tcp_store = store

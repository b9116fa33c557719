"""Small facts of the distributed layer: the shared key-value store, exact division.

Read by the group build, by layers that shard and by the tests. Must not hold state of its own: the store
lives in the context's resources and ends with ``reset_context``.
"""

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["divide", "get_global_tcp_store", "set_global_tcp_store"]


def get_global_tcp_store() -> Any | None:
    """The store through which ranks exchange small facts, or None when nobody installed one."""
    return get_resources().tcp_store


def set_global_tcp_store(store: Any) -> None:
    get_resources().tcp_store = store


def divide(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` where it must come out even."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator

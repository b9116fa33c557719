"""Owns the state "a graph is being recorded": entered by graph runners, asked by layers.

A layer that has a path with fixed shapes takes it then. It must not record anything itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.runtime_context import get_flags

__all__ = ["capture_mode", "is_capturing"]


@contextmanager
def capture_mode() -> Iterator[None]:
    """Recording, for a block; left on any exception."""
    with get_flags().capture.override(is_capturing=True):
        yield


def is_capturing() -> bool:
    """Whether this forward is recorded, or runs to warm up for it."""
    return get_flags().capture.is_capturing

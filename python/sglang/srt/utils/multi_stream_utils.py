"""Whether layers may spread independent work over several device streams.

Read by layers; the streams are used from the GPU path on. The answer is a context-local forward flag, so it
must not be read inside compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.runtime_context import get_forward

__all__ = ["do_multi_stream", "with_multi_stream"]


def do_multi_stream() -> bool:
    return get_forward().multi_stream


@contextmanager
def with_multi_stream(enabled: bool) -> Iterator[None]:
    """State the answer for the length of a block."""
    with get_forward().scoped(multi_stream=enabled):
        yield

"""What every expert runner shares: the buffer a caller may bring. The runners themselves arrive with expert
models.

Read by expert layers and runners. Must not hold the buffer: it lives in the forward flags for the length of
a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_forward

__all__ = ["moe_output_buffer_ctx"]


@contextmanager
def moe_output_buffer_ctx(buffer: Any) -> Iterator[None]:
    """Expert runners inside the block write into `buffer`; None lets them allocate."""
    with get_forward().scoped(moe_output_buffer=buffer):
        yield

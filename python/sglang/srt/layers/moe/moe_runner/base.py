"""What every expert runner shares: an output buffer of the caller. The runners come with expert models.

Must not hold the buffer: it is a forward flag for the length of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang.srt.runtime_context import get_forward

__all__ = ["moe_output_buffer_ctx"]


@contextmanager
def moe_output_buffer_ctx(buffer: torch.Tensor | None) -> Iterator[None]:
    """Expert runners inside the block write into `buffer`; None lets them allocate."""
    with get_forward().scoped(moe_output_buffer=buffer):
        yield

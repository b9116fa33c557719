"""Owns the recording of kernel calls: all operators of this package that a thread runs meanwhile.

Read by graph back ends and the tests. It keeps no tensor alive: whoever records holds all memory that the
calls read and write, for as long as it plays the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def num_recorded() -> int:
    """Calls in the list that this thread records; 0 where it records none."""
    return int(torch.ops.sgl_kernel.record_count())


class CallList:
    """Recorded calls, which `play` runs in their order without torch's dispatcher and without Python.

    Pointers, shapes and numbers are those of the recording; what lies in the tensors is read anew.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the calls that this thread makes inside the block; they run as well. Once for each list."""
        if self._number is not None:
            raise RuntimeError("this list is recorded already; make another one")
        torch.ops.sgl_kernel.record_begin()
        try:
            yield
        finally:
            self._number = torch.ops.sgl_kernel.record_end()

    def __len__(self) -> int:
        return 0 if self._number is None else int(torch.ops.sgl_kernel.record_size(self._number))

    def play(self) -> None:
        """Run all calls. `RuntimeError` where nothing was recorded, or after `drop`."""
        if self._number is None:
            raise RuntimeError("nothing is recorded in this list")
        torch.ops.sgl_kernel.record_play(self._number)

    def drop(self) -> None:
        """Forget the calls; a second call does nothing."""
        number, self._number = self._number, None
        if number is not None:
            torch.ops.sgl_kernel.record_drop(number)

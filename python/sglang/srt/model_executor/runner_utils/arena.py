"""Owns the memory of what recorded code makes on a CPU: handed out at capture, and used again.

Held by the back ends of one process that record there. A piece is free again once the last tensor over it is
gone, so a layer's activations lie where those of the layer before lay, and small graphs fit into what a large
one took. It must not give a piece to two tensors that live at the same time.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

#: Pieces are multiples of it; a cache line is 64.
_GRAIN = 4096


class Arena:
    """Pieces of memory of a few sizes; `bytes` is what all of them take."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []  # graphs read them by address: none goes before the arena
        self._free: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(piece.numel() for piece in self._pieces)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An unwritten tensor of the same type, shape and strides."""
        size = (_extent(tensor) * tensor.element_size() + _GRAIN - 1) // _GRAIN * _GRAIN
        if size == 0:
            return tensor
        piece = self._take(size)
        memory = (ctypes.c_char * piece.numel()).from_address(piece.data_ptr())
        whole = torch.frombuffer(
            memory, dtype=torch.uint8
        )  # its storage holds `memory`, and nothing else does
        weakref.finalize(memory, self._free.append, piece).atexit = False
        count = piece.numel() // tensor.element_size() * tensor.element_size()
        return whole[:count].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _take(self, size: int) -> torch.Tensor:
        fitting = [(piece.numel(), at) for at, piece in enumerate(self._free) if piece.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        self._pieces.append(torch.empty(size, dtype=torch.uint8))
        return self._pieces[-1]


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))

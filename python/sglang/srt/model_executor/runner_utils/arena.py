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
        memory = _memory_of(piece)
        taken = _over(memory, tensor, 0)  # its storage holds `memory`, and nothing else does
        weakref.finalize(memory, self._free.append, piece).atexit = False
        return taken

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which may be handed out again once `tensor` is gone; not of this arena: itself."""
        address = tensor.data_ptr()
        for piece in self._pieces:
            offset = address - piece.data_ptr()
            if 0 <= offset < piece.numel():
                return _over(_memory_of(piece), tensor, offset)
        return tensor

    def _take(self, size: int) -> torch.Tensor:
        fitting = [(piece.numel(), at) for at, piece in enumerate(self._free) if piece.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        self._pieces.append(torch.empty(size, dtype=torch.uint8))
        return self._pieces[-1]


def _memory_of(piece: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * piece.numel()).from_address(piece.data_ptr())


def _over(memory: ctypes.Array[ctypes.c_char], like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the type, shape and strides of `like`, `offset` bytes behind the beginning."""
    count = (len(memory) - offset) // like.element_size()
    whole = torch.frombuffer(memory, dtype=like.dtype, count=count, offset=offset)
    return whole.as_strided(like.shape, like.stride())


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))

"""Owns the collectives between ranks of one host over shared memory: the segment, its calls, the reference.

Read by a communicator whose ranks have found out that they share a host, and by the tests. The segment has no
name: rank 0 makes it in memory and the others open it through rank 0's descriptor, so that a rank that dies,
at any moment, leaves nothing behind. Must not find out who the ranks are: its caller does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

#: At most this much memory for the buffers of a group, and for one of the two buffers of a rank. Pages that
#: no tensor was large enough for are never taken.
MOST_BYTES = 4 << 20
MOST_PART_BYTES = 256 << 10
#: The most ranks of one group.
MOST_RANKS = 64

_OPS = {"sum": 0, "max": 1, "min": 2}
#: What can be reduced; any dtype can be gathered and broadcast.
REDUCED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


def part_bytes_of(world_size: int) -> int:
    """Bytes of one buffer of a rank; a larger tensor goes through it in parts."""
    return min(MOST_PART_BYTES, MOST_BYTES // (2 * max(1, world_size)) // 4096 * 4096)


def create_segment(world_size: int, part_bytes: int | None = None) -> int:
    """A descriptor of a new segment for so many ranks; close it when all of them have attached."""
    size = torch.ops.sgl_kernel.shm_segment_bytes(world_size, part_bytes or part_bytes_of(world_size))
    fd = os.memfd_create("sglang-collectives", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_segment(pid: int, fd: int) -> int:
    """An own descriptor of the segment that process `pid` has open as `fd`; `OSError` where it may not be."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class ShmGroup:
    """One rank's end of a group. All ranks make the same calls in the same order, one thread at a time.

    A call waits at most `timeout_s` seconds for each peer. `RuntimeError` where a peer ended, left, came too
    late or makes another call; the group is of no use afterwards, and the peers get an error, too.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        world_ranks: Sequence[int],
        *,
        cookie: int,
        timeout_s: float,
        part_bytes: int | None = None,
    ) -> None:
        """Map the segment behind `fd`. Rank 0 must do so first: it marks the segment with `cookie`.

        `world_ranks` are the numbers by which errors name the ranks, in group order.
        """
        self._rank = rank
        size = part_bytes or part_bytes_of(len(world_ranks))
        self._handle: int = torch.ops.sgl_kernel.shm_attach(
            fd, rank, list(world_ranks), size, cookie, timeout_s
        )

    def close(self) -> None:
        """Leave the group and unmap the segment; peers still read what was sent before. Twice is fine."""
        handle, self._handle = self._handle, 0
        if handle:
            torch.ops.sgl_kernel.shm_detach(handle)

    def all_reduce(self, input: torch.Tensor, out: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in rank order into `out`; half precision is summed in float32 and rounded once.

        input, out: contiguous, one shape, a dtype of `REDUCED_DTYPES`; they may be the same tensor.
        """
        torch.ops.sgl_kernel.shm_all_reduce(self._handle, input, out, _OPS[op])
        return out

    def all_gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, one after another; rows: [sizes[own rank], ...], contiguous."""
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        torch.ops.sgl_kernel.shm_all_gather(self._handle, rows, sizes, out)
        return out

    def reduce_scatter(self, rows: torch.Tensor, sizes: Sequence[int], op: str = "sum") -> torch.Tensor:
        """Reduce in rank order and keep the own rows; rows: [sum(sizes), ...], contiguous."""
        out = rows.new_empty(sizes[self._rank], *rows.shape[1:])
        torch.ops.sgl_kernel.shm_reduce_scatter(self._handle, rows, sizes, out, _OPS[op])
        return out

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """The contiguous tensor of rank `src`, written into those of the others."""
        torch.ops.sgl_kernel.shm_broadcast(self._handle, tensor, src)
        return tensor


def reduce_reference(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """What a reduction of the ranks' `pieces` gives, in torch: in rank order, half precision in float32."""
    half = pieces[0].dtype in (torch.float16, torch.bfloat16)
    reductions: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
    }
    reduce = reductions[op]
    total = pieces[0].float() if half else pieces[0]
    for piece in pieces[1:]:
        total = reduce(total, piece.float() if half else piece)
    return total.to(pieces[0].dtype)


@torch.library.register_fake("sgl_kernel::shm_all_reduce")
def _all_reduce_fake(group: int, input: torch.Tensor, out: torch.Tensor, op: int) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::shm_all_gather")
def _all_gather_fake(group: int, input: torch.Tensor, sizes: Sequence[int], out: torch.Tensor) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::shm_reduce_scatter")
def _reduce_scatter_fake(
    group: int, input: torch.Tensor, sizes: Sequence[int], out: torch.Tensor, op: int
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::shm_broadcast")
def _broadcast_fake(group: int, tensor: torch.Tensor, src: int) -> None:
    """Only writes into `tensor`."""

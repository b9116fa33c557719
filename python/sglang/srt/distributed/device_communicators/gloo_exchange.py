"""Owns the tensor collectives of CPU groups, all of them built on all-to-all.

Read by `GroupCoordinator`. Must not fall back to gloo's own reductions: pieces are summed on the receiving
rank in rank order, so that the sum of a row does not depend on the rows around it and all ranks hold the same
bits. gloo's ring promises neither, and one exchange is faster than its two rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed

__all__ = ["GlooExchange", "combine"]

#: Up to this many bytes every rank sends its whole tensor to every other (one exchange); above, each rank
#: reduces one part and sends the result round (two exchanges, 2/n of the traffic). Two ranks always send all:
#: the traffic is the same and one exchange is saved.
ONE_SHOT_BYTES = 1 << 20


def combine(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order given; half precision is summed in fp32 and rounded once."""
    first, *others = pieces
    if op != "sum":
        choose = torch.maximum if op == "max" else torch.minimum
        for piece in others:
            first = choose(first, piece)
        return first
    if len(others) == 1:
        return first + others[0]
    wide = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
    total = wide + others[0]
    for piece in others[1:]:
        total += piece
    return total.to(first.dtype)


def _row_width(rows: torch.Tensor) -> int:
    """Elements of one row; also known where there is no row."""
    width = 1
    for extent in rows.shape[1:]:
        width *= extent
    return width


class GlooExchange:
    """Collectives of one group. Rows are dim 0; `sizes` lists the rows of each rank in rank order."""

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._world_size = world_size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        flat = tensor.reshape(-1)
        if self._world_size == 2 or flat.numel() * flat.element_size() <= ONE_SHOT_BYTES:
            reduced = combine(self._gather_pieces(flat, [flat.numel()] * self._world_size), op)
        else:
            share, extra = divmod(flat.numel(), self._world_size)
            sizes = [share + (rank < extra) for rank in range(self._world_size)]
            reduced = torch.cat(self._gather_pieces(self.reduce_scatter(flat, sizes, op), sizes))
        return reduced.view(tensor.shape)

    def all_gather(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        width = _row_width(rows)
        pieces = self._gather_pieces(rows.reshape(-1), [size * width for size in sizes])
        return torch.cat(pieces).view(sum(sizes), *rows.shape[1:])

    def reduce_scatter(self, rows: torch.Tensor, sizes: Sequence[int], op: str) -> torch.Tensor:
        mine = sizes[self._rank]
        received = self.all_to_all(rows, [mine] * self._world_size, sizes)
        return combine(received.view(self._world_size, mine, *rows.shape[1:]).unbind(0), op)

    def all_to_all(
        self, rows: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> torch.Tensor:
        width = _row_width(rows)
        out = rows.new_empty(sum(out_sizes), *rows.shape[1:])
        self._exchange(
            out.view(-1),
            rows.reshape(-1),
            [size * width for size in out_sizes],
            [size * width for size in in_sizes],
        )
        return out

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), group_src=src, group=self._group)
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        flat = tensor.reshape(-1).view(torch.uint8)
        torch.distributed.send(flat, group_dst=dst, group=self._group)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        torch.distributed.recv(tensor.view(-1).view(torch.uint8), group_src=src, group=self._group)
        return tensor

    def _gather_pieces(self, flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's flat tensor, in rank order; the own one is neither sent nor copied."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        outgoing = flat if len(others) == 1 else flat.repeat(len(others))
        out_sizes, in_sizes = list(sizes), [flat.numel()] * self._world_size
        out_sizes[self._rank] = in_sizes[self._rank] = 0
        incoming = flat.new_empty(sum(out_sizes))
        self._exchange(incoming, outgoing, out_sizes, in_sizes)
        pieces = list(torch.split(incoming, out_sizes))
        pieces[self._rank] = flat
        return pieces

    def _exchange(
        self, out: torch.Tensor, flat: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> None:
        """All-to-all of flat tensors, as bytes: the transport then needs to know no dtype."""
        width = flat.element_size()
        torch.distributed.all_to_all_single(
            out.view(torch.uint8),
            flat.view(torch.uint8),
            [size * width for size in out_sizes],
            [size * width for size in in_sizes],
            group=self._group,
        )

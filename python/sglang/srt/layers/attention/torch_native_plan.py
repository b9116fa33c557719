"""Owns what the torch back end knows of a batch before its first layer: padded batches, runs, slots, masks.

Made and filled by the back end, from the batch and the table of slots, once per batch. It must not see
queries, keys or values, and must not ask the device for a length: lengths come from the batch's host lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.layers.attention.base_attn_backend import Plan, PlanShape

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch

#: A padded batch holds requests of at least half its longest length, so at most half of the work is padding;
#: below this length another batch costs more than the padding.
_MIN_LENGTH_TO_SPLIT = 256


@dataclass(slots=True)
class PaddedRows:
    """Requests with `width` new tokens each, padded to the longest.

    `rows` are their rows in the batch, one request after another (None: all rows in order), `slots` the flat
    table [requests * length], `mask` [requests, width, 1, length] adds minus infinity to what a row does not
    see, in each head (None: every row sees every key).
    """

    count: int
    width: int
    length: int
    rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class ManyRows:
    """One request with several new tokens.

    They are the rows `first : first + count`; `slots` are all of the request's and `mask` [count, length] is
    causal. Both are None without a cached prefix: then the keys of the new tokens are all there are.
    """

    first: int
    count: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


class TorchPlan(Plan):
    """The plan of an eager forward: exact sizes, new tensors at each fill."""

    __slots__ = ("many", "out_cache_loc", "padded")

    out_cache_loc: torch.Tensor  # [num_tokens]: where the keys and values of the new tokens go
    padded: list[PaddedRows]
    many: list[ManyRows]

    def fill(self, batch: ForwardBatch, req_to_token: torch.Tensor, dtype: torch.dtype) -> None:
        """Sort the requests into padded batches and runs; masks are of `dtype`."""
        self.out_cache_loc = batch.out_cache_loc
        width, tail_mask = rows_per_request(batch)
        self.many = []
        members: list[int] = []  # requests with `width` new tokens
        starts: list[int] = []  # and the first row of each
        first = 0
        for b, count in enumerate(batch.extend_lens):
            if count == width:
                members.append(b)
                starts.append(first)
            elif count > 0:
                self.many.append(_plan_many(batch, req_to_token, b, first, count))
            first += count
        parts = _split_by_length([batch.seq_lens_list[b] for b in members])
        self.padded = []
        for part in parts:
            lengths = [batch.seq_lens_list[members[i]] for i in part]
            table, rows, tail = batch.req_pool_indices, None, tail_mask
            if len(parts) > 1 or self.many:
                chosen = torch.tensor([members[i] for i in part], device=table.device)
                table = table[chosen]
                tail = None if tail is None else tail[chosen]
                rows = torch.tensor([starts[i] for i in part], device=table.device)
                if width > 1:
                    rows = (rows[:, None] + torch.arange(width, device=table.device)).view(-1)
            slots, mask = _pad(req_to_token, table, lengths, width, tail, dtype)
            self.padded.append(PaddedRows(len(part), width, max(lengths), rows, slots, mask))


class GraphPlan(TorchPlan):
    """A plan whose tensors stay where they are: every request is padded to the largest length."""

    __slots__ = ("lengths", "mask", "shape")

    def __init__(
        self,
        shape: PlanShape,
        *,
        slots: torch.Tensor,
        mask: torch.Tensor,
        lengths: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.mask = mask  # [requests, width, max_len]
        self.lengths = lengths  # [requests]
        self.out_cache_loc = out_cache_loc
        self.padded = [
            PaddedRows(shape.num_requests, shape.width, shape.max_len, None, slots, mask[:, :, None])
        ]
        self.many = []

    @classmethod
    def allocate(cls, shape: PlanShape, device: torch.device, dtype: torch.dtype) -> GraphPlan:
        """A plan with memory of its own, whose masks are of `dtype`."""
        count, width, length = shape.num_requests, shape.width, shape.max_len
        return cls(
            shape,
            slots=torch.zeros(count * length, dtype=torch.int64, device=device),
            mask=torch.zeros(count, width, length, dtype=dtype, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(count * width, dtype=torch.int64, device=device),
        )

    def part(self, num_requests: int) -> GraphPlan:
        """The first requests, over the same memory."""
        shape = replace(self.shape, num_requests=num_requests)
        return GraphPlan(
            shape,
            slots=self.padded[0].slots[: num_requests * shape.max_len],
            mask=self.mask[:num_requests],
            lengths=self.lengths[:num_requests],
            out_cache_loc=self.out_cache_loc[: num_requests * shape.width],
        )

    def fill(self, batch: ForwardBatch, req_to_token: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the batch into the tensors that are there."""
        width, tail_mask = rows_per_request(batch)
        count, max_len = self.shape.num_requests, self.shape.max_len
        lengths = batch.seq_lens_list
        if (
            batch.extend_lens != [self.shape.width] * count
            or width != self.shape.width
            or max(lengths) > max_len
        ):
            raise RuntimeError(
                f"a plan for {count} requests of {self.shape.width} rows and at most {max_len} keys cannot "
                f"hold a batch of {batch.extend_lens} rows and {lengths} keys; pad it, or run it eagerly"
            )
        self.out_cache_loc.copy_(batch.out_cache_loc)
        self.lengths.copy_(torch.tensor(lengths))
        slots = self.padded[0].slots.view(count, max_len)
        torch.index_select(req_to_token[:, :max_len], 0, batch.req_pool_indices, out=slots)
        slots.masked_fill_(_padding(self.lengths, max_len), 0)
        self._write_mask(tail_mask)

    def set_tail_mask(self, tail_mask: torch.Tensor) -> None:
        """Replace the mask, from the lengths of the last fill."""
        self._write_mask(tail_mask)

    def _write_mask(self, tail_mask: torch.Tensor | None) -> None:
        unseen = unseen_keys(self.lengths, self.shape.max_len, self.shape.width, tail_mask)
        self.mask.zero_().masked_fill_(unseen, float("-inf"))


def rows_per_request(batch: ForwardBatch) -> tuple[int, torch.Tensor | None]:
    """How many rows the requests have that are padded together, and what these see of the newest keys.

    `RuntimeError` for a round in which a request has another number of rows or fewer keys than the mask says.
    """
    spec = batch.spec
    if spec is None or batch.forward_mode is ForwardMode.EXTEND:
        return 1, None
    newest = spec.width if spec.tail_mask is None else spec.tail_mask.shape[2]
    if (
        batch.extend_lens != [spec.width] * batch.batch_size
        or min(batch.seq_lens_list, default=newest) < newest
    ):
        raise RuntimeError(
            f"a round of width {spec.width} whose mask covers the newest {newest} keys has requests with "
            f"{batch.extend_lens} rows and {batch.seq_lens_list} keys; each needs {spec.width} rows and at "
            f"least {newest} keys"
        )
    return spec.width, spec.tail_mask


def unseen_keys(
    lengths: torch.Tensor, length: int, width: int, tail_mask: torch.Tensor | None
) -> torch.Tensor:
    """Which of `length` keys each row does not see, [requests, width, length] bool; lengths is [requests].

    Without `tail_mask` row r sees the keys before `lengths - width + r + 1`. With it [requests, width, tail]
    a row sees all keys before the last `tail` and of those the ones that the mask names.
    """
    keys = torch.arange(length, device=lengths.device)
    if tail_mask is None:
        last = lengths[:, None] + torch.arange(-width, 0, device=lengths.device)
        return keys > last[:, :, None]
    tail = tail_mask.shape[2]
    place = keys - (lengths[:, None] - tail)  # of each key in the tail, [requests, length]
    unseen = ~tail_mask.gather(2, place.clamp(0, tail - 1)[:, None].expand(-1, width, -1))
    return unseen.logical_and_((place >= 0)[:, None]).logical_or_((place >= tail)[:, None])


def _pad(
    req_to_token: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    width: int,
    tail_mask: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots [requests * length] and mask of requests that lie in these rows of the table."""
    length = max(lengths)
    slots = req_to_token[:, :length].index_select(0, table)
    if width == 1 and tail_mask is None and min(lengths) == length:
        return slots.view(-1), None
    ends = torch.tensor(lengths, device=slots.device)
    unseen = unseen_keys(ends, length, width, tail_mask)
    if min(lengths) < length:  # the last row of a causal round sees all keys of its request
        padding = unseen[:, 0] if width == 1 and tail_mask is None else _padding(ends, length)
        slots.masked_fill_(padding, 0)
    mask = torch.zeros(unseen.shape, dtype=dtype, device=slots.device).masked_fill_(unseen, float("-inf"))
    return slots.view(-1), mask[:, :, None]


def _padding(lengths: torch.Tensor, length: int) -> torch.Tensor:
    return torch.arange(length, device=lengths.device) >= lengths[:, None]


def _plan_many(batch: ForwardBatch, req_to_token: torch.Tensor, b: int, first: int, count: int) -> ManyRows:
    length = batch.seq_lens_list[b]
    if length == count:
        return ManyRows(first, count, None, None)
    slots = req_to_token[batch.req_pool_indices[b], :length]
    mask = torch.ones(count, length, dtype=torch.bool, device=slots.device).tril_(length - count)
    return ManyRows(first, count, slots, mask)


def _split_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices into `lengths`, in parts that pad no member to more than twice its length (short ones aside).

    One part keeps the given order.
    """
    if not lengths:
        return []
    longest = max(lengths)
    if longest < _MIN_LENGTH_TO_SPLIT or min(lengths) * 2 >= longest:
        return [list(range(len(lengths)))]
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if parts:
            limit = lengths[parts[-1][0]]
            if limit < _MIN_LENGTH_TO_SPLIT or lengths[i] * 2 >= limit:
                parts[-1].append(i)
                continue
        parts.append([i])
    return parts

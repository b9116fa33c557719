"""Owns the batch that a recorded forward reads: static buffers, a plan for each size, and padding requests.

Held by graph runners, one for each forward in what they record. It must not run anything, nor read a length
off the device: plans are filled from host lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, Plan, PlanShape
from sglang.srt.layers.dp_attention import DpPaddingMode, set_is_extend_in_batch, size_dp_forward
from sglang.srt.model_executor.runner_utils.buffers import BufferSpec, StaticBuffers
from sglang.srt.runtime_context import get_parallel


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The batches for which graphs are recorded, by number of requests, and what all of them have room for.

    A request has at most `max_len` keys; `spare_row` is the row of the request table that nobody owns.
    Without `pads` a graph serves batches of its very size only.
    """

    requests: Sequence[int]
    max_len: int
    spare_row: int
    pads: bool = True


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """One forward of a recorded unit: its mode, and the rows that each request has in it.

    `tail`: how many of the newest keys a mask covers; 0 where every row sees all keys up to its own. The mask
    comes with the batch, or from inside the unit (`mask_in_unit`).
    """

    mode: ForwardMode
    width: int
    tail: int = 0
    mask_in_unit: bool = False


class StaticBatch:
    """One forward's batch for every size: `stage` writes it, `batch(size)` is what the recorded code reads.

    A request that only fills the batch up reads the spare row and writes slot 0, which nobody owns. It has as
    many keys as a mask covers, so that each of its rows sees one: a row without any would be NaN, and so
    would slot 0, which padding reads.
    """

    def __init__(
        self, attn_backend: AttentionBackend, shape: ForwardShape, sizes: GraphSizes, device: torch.device
    ) -> None:
        self.attn_backend = attn_backend
        self.shape = shape
        width = shape.width
        self._padding_len = attn_backend.padded_seq_len(max(width, shape.tail))
        specs = [
            BufferSpec("input_ids", rows=width),
            BufferSpec("positions", rows=width),
            BufferSpec("out_cache_loc", rows=width),
            BufferSpec("req_pool_indices", padding=sizes.spare_row),
            BufferSpec("seq_lens", padding=self._padding_len),
        ]
        if shape.tail and not shape.mask_in_unit:
            specs.append(BufferSpec("tail_mask", dtype=torch.bool, shape=(width, shape.tail), padding=True))
        largest = max(sizes.requests)
        self.buffers = StaticBuffers(specs, largest, device)
        whole = attn_backend.make_plan(PlanShape(largest, width, sizes.max_len))
        self._plans = {size: attn_backend.part_of_plan(whole, size) for size in sizes.requests}
        self._staged = {size: self.batch(size) for size in sizes.requests}  # what plans are filled from

    def plan(self, size: int) -> Plan:
        """The plan that the recorded code of this size reads."""
        return self._plans[size]

    def stage(self, batch: ForwardBatch, size: int) -> None:
        """Write a batch of at most `size` requests, and padding behind it, into buffers and plan."""
        values = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "out_cache_loc": batch.out_cache_loc,
            "req_pool_indices": batch.req_pool_indices,
            "seq_lens": batch.seq_lens,
        }
        if self.shape.tail and not self.shape.mask_in_unit:
            values["tail_mask"] = self._tail_mask(batch)
        self.buffers.write(values, batch.batch_size, size)
        self._fill_plan(batch.seq_lens_list, size)

    def stage_padding(self, size: int) -> None:
        """Make all requests padding."""
        self.buffers.reset(size)
        self._fill_plan([], size)

    def batch(self, size: int) -> ForwardBatch:
        """The batch over the static buffers. All rows are scored; its host list is that of padding."""
        views = self.buffers.views(size)
        width = self.shape.width
        return ForwardBatch(
            forward_mode=self.shape.mode,
            input_ids=views["input_ids"],
            positions=views["positions"],
            out_cache_loc=views["out_cache_loc"],
            req_pool_indices=views["req_pool_indices"],
            seq_lens=views["seq_lens"],
            seq_lens_list=[self._padding_len] * size,
            extend_lens=[width] * size,
            sampling_states=[None] * size,
            spec=SpecInput(width, tail_mask=views.get("tail_mask")),
        )

    def _fill_plan(self, lengths: list[int], size: int) -> None:
        batch = self._staged[size]
        batch.seq_lens_list = lengths + [self._padding_len] * (size - len(lengths))
        self.attn_backend.fill(self._plans[size], batch)

    def _tail_mask(self, batch: ForwardBatch) -> torch.Tensor:
        """The mask of the batch; a chain is the tree in which every node follows the one before it."""
        mask = batch.spec.tail_mask if batch.spec is not None else None
        if mask is not None:
            return mask
        width, tail = self.shape.width, self.shape.tail
        chain = torch.ones(width, tail, dtype=torch.bool, device=batch.input_ids.device).tril(tail - width)
        return chain.expand(batch.batch_size, width, tail)


def step_of_graph(num_requests: int, *, rows: int, logit_rows: int) -> DpStep | None:
    """The step in which every replica brings so many requests, and the sizes of its forward written.

    `rows` and `logit_rows` are those of each request. A step that replays a graph pads all replicas to the
    same rows, whatever each has. None where there is one replica.
    """
    replicas = get_parallel().attn_dp_size
    if replicas == 1:
        return None
    step = DpStep([], [], is_extend=False, num_requests=[num_requests] * replicas)
    step = step.of_phase(rows=rows, logit_rows=logit_rows)
    size_dp_forward(step.num_tokens, DpPaddingMode.MAX_LEN)
    set_is_extend_in_batch(False)
    return step


def requests_of_largest_replica(batch: ForwardBatch, width: int) -> int | None:
    """How many requests of `width` rows a graph must have room for; None where this step runs no such graph.

    Decided from the agreed step where there is one: a rank that went by its own requests would hang the rest.
    """
    step = batch.dp_step
    if step is None:
        return batch.batch_size if batch.num_tokens == batch.batch_size * width else None
    most = max(step.num_tokens)
    if step.is_extend or most % width or (step.num_requests and most != max(step.num_requests) * width):
        return None
    return most // width

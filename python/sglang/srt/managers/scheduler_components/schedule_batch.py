"""Owns the queues of requests, the plan of a step, and how planned requests become one forward batch.

Read and written by the scheduler's parts. It must not choose requests (the planners do) and must not
allocate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.req import Req


@dataclass(slots=True)
class RequestQueues:
    """Where every request is: waiting (holds nothing), prefilling (a prompt cut into chunks), or running."""

    waiting: deque[Req] = field(default_factory=deque)
    prefilling: Req | None = None
    running: list[Req] = field(default_factory=list)

    @property
    def num_started(self) -> int:
        return len(self.running) + (self.prefilling is not None)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running and self.prefilling is None

    def started(self) -> Iterator[Req]:
        """Every request that holds slots."""
        yield from self.running
        if self.prefilling is not None:
            yield self.prefilling


@dataclass(slots=True)
class PrefillPart:
    """The tokens `start .. end - 1` of one request, computed in one forward; `slots` is where they go.

    `next_id` is the known token that follows them; None where they complete the prompt.
    """

    req: Req
    ids: np.ndarray
    start: int
    end: int
    slots: np.ndarray
    next_id: int | None

    @property
    def completes_prompt(self) -> bool:
        return self.next_id is None


@dataclass(slots=True)
class Riders:
    """Requests that decode one token each in a forward with prompts; `slots[i]` is where it goes."""

    reqs: list[Req]
    slots: np.ndarray


@dataclass(slots=True)
class ScheduledBatch:
    """A forward and the requests behind its rows.

    `parts` is None for a decode batch. Requests behind the parts decode one token in the same forward.
    """

    reqs: list[Req]
    forward: ForwardBatch
    parts: list[PrefillPart] | None = None


@dataclass(slots=True)
class Plan:
    """What a step does: the batch to run, and the requests that the full pool ended or sent back to wait."""

    batch: ScheduledBatch | None = None
    ended: list[Req] = field(default_factory=list)
    retracted: list[Req] = field(default_factory=list)


def make_prefill_batch(
    parts: list[PrefillPart], device: torch.device, riders: Riders | None = None
) -> ScheduledBatch:
    """One EXTEND forward over the parts, in their order; each rider is one more request of one row."""
    decoding = [] if riders is None else riders.reqs
    lens = [part.end - part.start for part in parts] + [1] * len(decoding)
    seq_lens = [part.end for part in parts] + [req.kv_len + 1 for req in decoding]
    tokens = np.empty((3, sum(lens)), dtype=np.int64)  # ids, positions, slots
    at = 0
    for part, count in zip(parts, lens):
        tokens[0, at : at + count] = part.ids
        tokens[1, at : at + count] = np.arange(part.start, part.end)
        tokens[2, at : at + count] = part.slots
        at += count
    if riders is not None:
        tokens[0, at:] = [req.output_ids[-1] for req in decoding]
        tokens[1, at:] = [req.kv_len for req in decoding]
        tokens[2, at:] = riders.slots
    reqs = [part.req for part in parts] + decoding
    per_req = np.array([[req.req_pool_idx for req in reqs], seq_lens], dtype=np.int64)
    input_ids, positions, slots = torch.from_numpy(tokens).to(device)
    req_pool_indices, lengths = torch.from_numpy(per_req).to(device)
    asks = [_prefill_logprobs(part) for part in parts] + [req.logprob_request for req in decoding]
    forward = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=slots,
        req_pool_indices=req_pool_indices,
        seq_lens=lengths,
        seq_lens_list=seq_lens,
        extend_lens=lens,
        sampling_states=[
            part.req.sampling if part.completes_prompt and part.req.draws_a_token else None for part in parts
        ]
        + [req.sampling for req in decoding],
        logprob_requests=asks if any(ask is not None for ask in asks) else None,
        next_prompt_ids=[part.next_id for part in parts] + [None] * len(decoding),
    )
    return ScheduledBatch(reqs, forward, parts)


def make_decode_batch(
    reqs: list[Req],
    req_pool_indices: np.ndarray,
    lengths: np.ndarray,
    slots: np.ndarray,
    device: torch.device,
    *,
    slots_per_request: int = 1,
    num_recent_ids: int = 0,
) -> ScheduledBatch:
    """One DECODE forward: the newest token of request b goes to `slots[b]` at position `lengths[b]`.

    From its position on each request has `slots_per_request` slots.
    """
    count = len(reqs)
    packed = np.empty((5, count), dtype=np.int64)
    packed[0] = [req.output_ids[-1] for req in reqs]
    packed[1] = lengths
    packed[2] = slots
    packed[3] = req_pool_indices
    packed[4] = lengths + 1
    input_ids, positions, out_cache_loc, rows, seq_lens = torch.from_numpy(packed).to(device)
    forward = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=out_cache_loc,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_list=packed[4].tolist(),
        extend_lens=[1] * count,
        sampling_states=[req.sampling for req in reqs],
        logprob_requests=[req.logprob_request for req in reqs]
        if any(req.return_logprob for req in reqs)
        else None,
        slots_per_request=slots_per_request,
        recent_ids=[req.recent_ids(num_recent_ids) for req in reqs] if num_recent_ids else None,
    )
    return ScheduledBatch(reqs, forward)


def _prefill_logprobs(part: PrefillPart) -> LogprobRequest | None:
    """Prompt logprobs that this part can give, and the output side once the prompt is complete."""
    req = part.req
    base = req.logprob_request
    if base is None:
        return None
    first_row, targets = req.prompt_targets(part.start, part.end)
    if not targets:
        return base if part.completes_prompt and req.draws_a_token else None
    return LogprobRequest(
        top_num=base.top_num, token_ids=base.token_ids, first_row=first_row, targets=targets
    )

"""Owns what attention-DP replicas agree on each step: which forward runs, who has work, when all leave.

Asked by the scheduler while it plans and after it, and by the prefill delayer before. It must not plan: each
replica's batch is its own business, only its sizes are exchanged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.messages.io_struct import DispatchedReq, Message
from sglang.srt.model_executor.result_broadcast import plan_checksum
from sglang.srt.runtime_context import get_parallel

#: With a draft, steps with prompts in a row after which replicas that wait to decode do so once.
MAX_PROMPT_STEPS = 4
#: Votes on a step: a prompt is planned; or none is, and requests run. 0: neither.
_PROMPT, _COULD_DECODE = 1, 2


class ReplicaFacts(NamedTuple):
    """What one replica tells the others in a step; plain integers, gathered as one row."""

    received: int  # messages from its channel since the start, dispatch notes not counted
    stopping: int
    has_requests: int
    num_requests: int  # of its batch
    num_tokens: int
    num_logit_rows: int
    is_extend: int
    slots_per_request: int
    plan: int  # checksum of the batch; what the replica's ranks must agree on


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after the exchange. `step` is None when no replica has a token to compute."""

    step: DpStep | None
    stopping: bool
    has_requests: bool


def gather_from_replicas(fields: tuple[str, ...], mine: tuple[int, ...]) -> list[list[int]]:
    """One row per attention-DP replica, from one gather over the tensor group.

    All ranks of a replica must have sent the same: their forwards only meet when they planned the same batch.
    """
    parallel = get_parallel()
    gathered = parallel.tp_group.all_gather(torch.tensor([mine], dtype=torch.int64))
    rows: list[list[int]] = gathered.tolist()
    ranks_each = len(rows) // parallel.attn_dp_size
    for rank, row in enumerate(rows):
        leader = rank - rank % ranks_each
        if row != rows[leader]:
            differing = [
                f"{name} {a} and {b}" for name, a, b in zip(fields, rows[leader], row, strict=True) if a != b
            ]
            raise RuntimeError(
                f"TP ranks {leader} and {rank} hold the same requests (attention-DP replica "
                f"{rank // ranks_each}) and decided differently: {', '.join(differing)}"
            )
    return rows[::ranks_each]


class DpAttnSync:
    """One gather a step, with a draft two.

    When nobody has work, only the leader of replica 0 waits for messages. The others wait for it in the next
    gather, so it must not wait while a message is under way to one of them.
    """

    def __init__(self) -> None:
        parallel = get_parallel()
        self._num_replicas: int = parallel.attn_dp_size
        self._is_first = parallel.attn_dp_rank == 0
        self._num_received = 0
        self._dispatched = [0] * self._num_replicas
        self._all_arrived = True
        self._num_prompt_steps = 0  # in a row, while some replica could have decoded

    def count_received(self, message: Message) -> None:
        """Count a message of the leader's channel; a dispatch note says how many each replica was sent."""
        if not isinstance(message, DispatchedReq):
            self._num_received += 1
            return
        if len(message.counts) != self._num_replicas:
            raise RuntimeError(
                f"a dispatch note speaks of {len(message.counts)} replicas, and this tensor group has "
                f"{self._num_replicas}"
            )
        self._dispatched = message.counts

    @property
    def may_rest(self) -> bool:
        """True on the ranks of replica 0 once every replica has what it was sent."""
        return self._is_first and self._all_arrived

    @property
    def prompts_wait(self) -> bool:
        """Whether this step is for decoding alone, on every rank: too many before it had prompts."""
        return self._num_prompt_steps >= MAX_PROMPT_STEPS

    def may_decode(self, *, has_prompt: bool, has_running: bool) -> bool:
        """Whether no replica has planned a prompt for this step; asked once a step where there is a draft.

        Prompts and verify rounds have different collectives, so a step has either. `has_prompt` must say what
        is planned, not what waits: a prompt that finds no room would keep everybody from decoding for ever.
        """
        mine = _PROMPT if has_prompt else _COULD_DECODE if has_running else 0
        votes = [vote for (vote,) in gather_from_replicas(("vote on prompts",), (mine,))]
        some_prompt, someone_waits = _PROMPT in votes, _COULD_DECODE in votes
        self._num_prompt_steps = self._num_prompt_steps + 1 if some_prompt and someone_waits else 0
        return not some_prompt

    def agree(self, *, stopping: bool, has_requests: bool, batch: ForwardBatch | None) -> Agreement:
        """Exchange what each replica is about to do; every rank of the tensor group calls it once a step."""
        mine = self._facts(stopping, has_requests, batch)
        rows = [ReplicaFacts(*row) for row in gather_from_replicas(ReplicaFacts._fields, mine)]
        self._all_arrived = all(
            row.received >= sent for row, sent in zip(rows, self._dispatched, strict=True)
        )
        step = None
        if any(row.num_tokens for row in rows):
            step = DpStep(
                num_tokens=[row.num_tokens for row in rows],
                num_logit_rows=[row.num_logit_rows for row in rows],
                is_extend=any(row.is_extend for row in rows),
                num_requests=[row.num_requests for row in rows],
                slots_per_request=min(row.slots_per_request for row in rows if row.num_tokens),
            )
        return Agreement(
            step=step,
            stopping=any(row.stopping for row in rows),
            has_requests=any(row.has_requests for row in rows),
        )

    def _facts(self, stopping: bool, has_requests: bool, batch: ForwardBatch | None) -> ReplicaFacts:
        nothing = ReplicaFacts(
            received=self._num_received,
            stopping=int(stopping),
            has_requests=int(has_requests),
            num_requests=0,
            num_tokens=0,
            num_logit_rows=0,
            is_extend=0,
            slots_per_request=0,
            plan=0,
        )
        if batch is None:
            return nothing
        return nothing._replace(
            num_requests=batch.batch_size,
            num_tokens=batch.num_tokens,
            num_logit_rows=batch.num_logit_rows,
            is_extend=int(batch.forward_mode is ForwardMode.EXTEND),
            slots_per_request=batch.slots_per_request,
            plan=plan_checksum(batch) if get_parallel().attn_tp_size > 1 else 0,
        )

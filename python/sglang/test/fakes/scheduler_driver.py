"""Owns how tests make a scheduler over a fake worker, send it requests, and step it to the end.

Read by scheduler tests; `worker_driver` is its counterpart for models. It must not hide a step: invariants
are checked after each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.io_struct import Message, TokenizedGenerateReqInput
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.fake_channel import Answer, FakeChannel, answers
from sglang.test.fakes.fake_worker import FakeTokenizer, FakeWorker


def make_request(
    rid: str, prompt: Sequence[int], max_new_tokens: int = 8, **fields: Any
) -> TokenizedGenerateReqInput:
    """A greedy request; fields of `SamplingParams` and of the message are told apart by name."""
    params = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__struct_fields__}
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=list(prompt),
        sampling_params=SamplingParams(
            **{"max_new_tokens": max_new_tokens, "temperature": 0.0, "sampling_seed": 1, **params}
        ),
        **fields,
    )


def create_scheduler(
    *,
    pool_tokens: int = 4096,
    page_size: int = 1,
    max_requests: int = 64,
    context_len: int = 2048,
    slots_per_step: int = 1,
    num_recent_ids: int = 0,
    world_rank: int = 0,
    groups: Mapping[str, Any] | None = None,
    **server_args_fields: Any,
) -> Scheduler:
    """Publish a record with these fields and build a scheduler over a `FakeWorker` and a `FakeChannel`.

    They are reachable as `scheduler.worker` and `scheduler.channel` (None on a peer of an attention-TP
    group). With several ranks, `groups` are stated by name; without them real ones are built. Call
    `reset_context()` when done.
    """
    record = ServerArgs(
        **{"model_path": "dummy", "chunked_prefill_size": 512, "page_size": page_size, **server_args_fields}
    )
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, dp_rank=None))
    parallel = get_parallel()
    if groups is not None:
        parallel.override_permanently(**groups)
    elif parallel.tp_size > 1:
        parallel_state.initialize_model_parallel()
    worker = FakeWorker(
        pool_tokens=pool_tokens,
        page_size=page_size,
        max_requests=max_requests,
        context_len=context_len,
        slots_per_step=slots_per_step,
        num_recent_ids=num_recent_ids,
    )
    channel = FakeChannel() if parallel.is_attn_tp_leader else None
    return Scheduler(worker, tokenizer=FakeTokenizer(), channel=channel)


def run(
    scheduler: Scheduler, *messages: Message, max_steps: int = 20_000, check: bool = True
) -> dict[str, Answer]:
    """Send the messages, step until nothing is left, and give all answers so far.

    The invariants are checked after every step.
    """
    channel = scheduler.channel
    assert isinstance(channel, FakeChannel)
    channel.inbox.extend(messages)
    for _ in range(max_steps):
        going_on = checked_step(scheduler) if check else scheduler.step()
        if not going_on and not channel.inbox:
            return answers(channel)
    raise AssertionError(f"not done after {max_steps} steps")


def checked_step(scheduler: Scheduler) -> bool:
    """One step, after which all invariants hold; True while requests are left."""
    going_on = scheduler.step()
    scheduler.invariants.check_sum()
    scheduler.invariants.check_lengths()
    scheduler.invariants.check_slots()
    return going_on

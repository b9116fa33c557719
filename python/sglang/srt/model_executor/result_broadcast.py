"""Owns how the ranks of an attention-TP group get the same tokens: the leader draws and broadcasts them.

Called by the worker after each forward. It must not draw: it carries the leader's result, and checksums of
the batch that it belongs to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
from sglang.srt.runtime_context import get_parallel

#: First word of the broadcast, so that a rank that is at another collective notices.
RESULT = "result"

_encoder = msgspec.msgpack.Encoder()

Shared = TypeVar("Shared")


def plan_fingerprint(batch: ForwardBatch) -> dict[str, int]:
    """What two ranks must have in common to run one forward together, by name."""
    return {
        "batch size": batch.batch_size,
        "num_tokens": batch.num_tokens,
        "num_logit_rows": batch.num_logit_rows,
        "seq_lens": _checksum(batch.seq_lens),
        "input_ids": _checksum(batch.input_ids),
        "positions": _checksum(batch.positions),
        "out_cache_loc": _checksum(batch.out_cache_loc),
        "req_pool_indices": _checksum(batch.req_pool_indices),
    }


def plan_checksum(batch: ForwardBatch) -> int:
    """The fingerprint as one number."""
    return zlib.crc32(repr(list(plan_fingerprint(batch).values())).encode())


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().numpy().tobytes())


def share_result(batch: ForwardBatch, draw: Callable[[], GenerationBatchResult]) -> GenerationBatchResult:
    """The result of `batch` on every rank of the attention-TP group; `draw` is called on the leader only."""

    def read() -> GenerationBatchResult:
        result = draw()
        result.read()
        return result

    return draw() if get_parallel().attn_tp_size == 1 else share(batch, read, GenerationBatchResult)


def share(batch: ForwardBatch, compute: Callable[[], Shared], kind: type[Shared]) -> Shared:
    """What the leader of the attention-TP group computes for `batch`, on every rank of the group.

    `kind` is a dataclass of plain values. `RuntimeError` where a rank runs another batch than its leader.
    """
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return compute()
    group = parallel.attn_tp_group
    if parallel.is_attn_tp_leader:
        result = compute()
        group.broadcast_object([RESULT, plan_fingerprint(batch), _encoder.encode(result)], src=0)
        return result
    received = group.broadcast_object(None, src=0)
    mine = plan_fingerprint(batch)
    if not isinstance(received, list) or received[0] != RESULT:
        raise RuntimeError(
            f"rank {parallel.attn_tp_rank} of the attention-TP group ran a batch ({_shown(mine)}) and its "
            "leader ran none: the two planned differently"
        )
    _, theirs, packed = received
    if theirs != mine:
        raise RuntimeError(
            f"rank {parallel.attn_tp_rank} of the attention-TP group ran another batch than its leader: "
            f"{_shown(mine)} here, {_shown(theirs)} there"
        )
    return msgspec.msgpack.decode(packed, type=kind)


def _shown(fingerprint: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fingerprint.items())

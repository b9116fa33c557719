"""Attention data parallelism: public names, and the sizes of one forward over all replicas.

Read by layers, the model runner, the scheduler and the doors. `is_dp_attention_enabled` says what the
deployment is and is read outside model code; layers branch on `get_parallel().attn_dp_size`. Must not keep
a width or a rank, and moves no rows (`dp_gather` does).
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.arg_groups.fields.parallel import attn_dp_size_of
from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.layers.exchange.dp_padding import DpPaddingMode
from sglang.srt.runtime_context import get_flags, get_forward, get_parallel
from sglang.srt.runtime_context.widths import derive_attention_ranks, derive_attention_widths

__all__ = [
    "DpPaddingMode",
    "compute_dp_attention_world_info",
    "dp_gather_slot",
    "get_dp_dtype",
    "get_dp_global_num_tokens",
    "get_global_dp_buffer_len",
    "get_is_extend_in_batch",
    "get_local_dp_buffer_len",
    "initialize_dp_attention",
    "is_dp_attention_enabled",
    "is_dp_max_padding",
    "prepare_dp_forward",
    "set_dp_buffer_len",
    "set_is_extend_in_batch",
    "size_dp_forward",
    "update_dp_attention_post_scale",
]


def is_dp_attention_enabled() -> bool:
    """Whether this deployment runs attention data parallelism; stays true inside a draft's scope."""
    return get_flags().dp.enabled


def compute_dp_attention_world_info(
    enable_dp_attention: bool, tp_rank: int, tp_size: int, dp_size: int, attn_cp_size: int = 1
) -> tuple[int, int, int, int]:
    """`(attn_tp_rank, attn_tp_size, attn_dp_rank, attn_dp_size)` of one tensor rank; the last two are 0,
    1 without it."""
    replicas = attn_dp_size_of(enable_dp_attention, dp_size)
    widths = derive_attention_widths(tp_size=tp_size, attn_cp_size=attn_cp_size, attn_dp_size=replicas)
    attn_tp_size = widths["attn_tp_size"]
    ranks = derive_attention_ranks(tp_rank=tp_rank, attn_tp_size=attn_tp_size, attn_cp_size=attn_cp_size)
    return ranks.attn_tp_rank, attn_tp_size, ranks.attn_dp_rank, replicas


def initialize_dp_attention(*, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Stamp this process's replica and record what a gathered row is.

    A process that published a rank bundle has the same stamp already. RuntimeError inside a scope: the
    replica of a draft's placement would stay for good.
    """
    parallel = get_parallel()
    with parallel.no_scope_open("initialize_dp_attention()"):
        ranks = derive_attention_ranks(
            tp_rank=parallel.tp_rank, attn_tp_size=parallel.attn_tp_size, attn_cp_size=parallel.attn_cp_size
        )
        parallel.override_permanently(attn_dp_rank=ranks.attn_dp_rank)
    _DpGatheredBufferWrapper.set_metadata(hidden_size, dtype, device)


def dp_gather_slot() -> int:
    """Index of this process in the list that a DP sync gathers.

    Over the replicas that is the replica; once a scale-up has moved the gather to the whole WORLD it is the
    world seat, unless this joiner does not take part in that gather yet.
    """
    parallel, dp = get_parallel(), get_flags().dp
    if dp.use_world_group_for_gather and not dp.joiner_skip_all_gather:
        return parallel.ep_join_rank_offset + parallel.tp_rank
    return parallel.attn_dp_rank


def update_dp_attention_post_scale(*, new_dp_size: int, new_dp_rank: int) -> None:
    """After an elastic scale-up the gather spans the WORLD. No width and no rank of this cohort changes."""
    if not 0 <= new_dp_rank < new_dp_size:
        raise ValueError(
            f"0 <= new_dp_rank < new_dp_size does not hold: rank {new_dp_rank}, width {new_dp_size}"
        )
    get_flags().dp.use_world_group_for_gather = True


class _DpGatheredBufferWrapper:
    """What a gathered row is: fixed at start, while the number of rows changes per forward.

    The moves themselves make their rows like those that they are given, so that a draft of another hidden
    size needs no second record.
    """

    @staticmethod
    def set_metadata(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        dp = get_flags().dp
        dp.hidden_size, dp.dtype, dp.device = hidden_size, dtype, device


def prepare_dp_forward(batch: ForwardBatch) -> None:
    """Size this forward from the step that the replicas agreed on; RuntimeError where the batch is not the
    part that this replica announced.
    """
    parallel, step = get_parallel(), batch.dp_step
    if step is None:
        raise RuntimeError(
            f"a forward over {parallel.attn_dp_size} attention-DP replicas needs the step that they agreed "
            "on: set ForwardBatch.dp_step, or build the batch with ForwardBatch.idle(step, device)"
        )
    replica, counts = parallel.attn_dp_rank, step.num_tokens
    agreed = (len(counts), counts[replica], len(step.num_logit_rows), step.num_logit_rows[replica])
    found = (parallel.attn_dp_size, batch.num_tokens, parallel.attn_dp_size, batch.num_logit_rows)
    if agreed != found:
        raise RuntimeError(
            f"attention-DP replica {replica} of {parallel.attn_dp_size} runs a batch of {batch.num_tokens} "
            f"tokens and {batch.num_logit_rows} rows to score, and the replicas agreed on tokens {counts} "
            f"and rows {step.num_logit_rows}: gather the step from the batch that runs"
        )
    size_dp_forward(
        counts,
        DpPaddingMode.get_dp_padding_mode(is_extend_in_batch=step.is_extend, global_num_tokens=counts),
    )
    set_is_extend_in_batch(step.is_extend)


def size_dp_forward(counts: list[int], mode: DpPaddingMode) -> None:
    """Write the sizes of a forward over replicas with `counts` tokens.

    MAX_LEN: each replica's rows are padded to the same number, a multiple of the attention-TP width, because
    each of its ranks contributes an equal slice of them. SUM_LEN: exact rows. Tokens [3, 5] over an
    attention-TP width of 2 become 6 + 6 rows, or 3 + 5.
    """
    parallel = get_parallel()
    if mode.is_max_len():
        rows = -(-max(counts) // parallel.attn_tp_size) * parallel.attn_tp_size
        set_dp_buffer_len(parallel.attn_dp_size * rows, rows, True, counts)
    else:
        set_dp_buffer_len(sum(counts), counts[parallel.attn_dp_rank], False, counts)


def set_dp_buffer_len(
    global_len: int, local_len: int, max_padding: bool, global_num_tokens: list[int] | None = None
) -> None:
    """Sizes of this forward's gathered rows; they stay until the next write or reset.

    `global_len` rows of all replicas, `local_len` of this one (both with padding), and the tokens that
    each replica really has.
    """
    forward = get_forward()
    forward.set("dp_global_buffer_len", global_len)
    forward.set("dp_local_buffer_len", local_len)
    forward.set("dp_max_padding", max_padding)
    forward.set("dp_global_num_tokens", global_num_tokens)


def get_global_dp_buffer_len() -> int | None:
    return get_forward().dp_global_buffer_len


def get_local_dp_buffer_len() -> int | None:
    return get_forward().dp_local_buffer_len


def get_dp_global_num_tokens() -> list[int] | None:
    """Tokens of each replica, without padding; None where nobody stated them."""
    return get_forward().dp_global_num_tokens


def is_dp_max_padding() -> bool:
    return get_forward().dp_max_padding


def get_dp_dtype() -> Any:
    return get_flags().dp.dtype


def get_is_extend_in_batch() -> bool:
    """Whether some replica of this forward runs a prompt; stays until the next write."""
    return get_forward().is_extend_in_batch


def set_is_extend_in_batch(is_extend_in_batch: bool) -> None:
    get_forward().set("is_extend_in_batch", is_extend_in_batch)

"""Attention data parallelism: public names, and the sizes of one forward over all replicas.

Read by layers, the model runner, the scheduler and the server. `is_dp_attention_enabled` is about the
deployment and read outside of models; layers ask `get_parallel().attn_dp_size`. Must not keep a width or a
rank, nor move rows (`exchange/dp_gather.py` does).
"""

from __future__ import annotations

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
    """Whether the deployment has attention replicas, also where a draft's scope says that there is one."""
    return get_flags().dp.enabled


def compute_dp_attention_world_info(
    enable_dp_attention: bool, tp_rank: int, tp_size: int, dp_size: int, attn_cp_size: int = 1
) -> tuple[int, int, int, int]:
    """`(attn_tp_rank, attn_tp_size, attn_dp_rank, attn_dp_size)` of one tensor rank."""
    replicas = attn_dp_size_of(enable_dp_attention, dp_size)
    widths = derive_attention_widths(tp_size=tp_size, attn_cp_size=attn_cp_size, attn_dp_size=replicas)
    attn_tp_size = widths["attn_tp_size"]
    ranks = derive_attention_ranks(tp_rank=tp_rank, attn_tp_size=attn_tp_size, attn_cp_size=attn_cp_size)
    return ranks.attn_tp_rank, attn_tp_size, ranks.attn_dp_rank, replicas


def initialize_dp_attention(*, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Stamp the replica of this process and record what a gathered row is.

    A process that published its ranks has the same stamp already. `RuntimeError` inside a scope, whose rank
    would stay stamped after it.
    """
    parallel = get_parallel()
    with parallel.no_scope_open("initialize_dp_attention()"):
        ranks = derive_attention_ranks(
            tp_rank=parallel.tp_rank, attn_tp_size=parallel.attn_tp_size, attn_cp_size=parallel.attn_cp_size
        )
        parallel.override_permanently(attn_dp_rank=ranks.attn_dp_rank)
    _DpGatheredBufferWrapper.set_metadata(hidden_size, dtype, device)


def dp_gather_slot() -> int:
    """Index of this process in the list that replicas gather.

    That is its replica. After an elastic scale-up the whole world gathers, and it is the world rank, except
    on a joiner that does not take part yet.
    """
    parallel, dp = get_parallel(), get_flags().dp
    if dp.use_world_group_for_gather and not dp.joiner_skip_all_gather:
        return parallel.ep_join_rank_offset + parallel.tp_rank
    return parallel.attn_dp_rank


def update_dp_attention_post_scale(*, new_dp_size: int, new_dp_rank: int) -> None:
    """After an elastic scale-up the whole world gathers; no width and no rank of this cohort changes."""
    if not 0 <= new_dp_rank < new_dp_size:
        raise ValueError(
            f"0 <= new_dp_rank < new_dp_size does not hold: rank {new_dp_rank}, width {new_dp_size}"
        )
    get_flags().dp.use_world_group_for_gather = True


class _DpGatheredBufferWrapper:
    """Records what a gathered row is. The gathers themselves go by the rows that they are given."""

    @staticmethod
    def set_metadata(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        dp = get_flags().dp
        dp.hidden_size, dp.dtype, dp.device = hidden_size, dtype, device


def prepare_dp_forward(batch: ForwardBatch) -> None:
    """Size this forward from the step that the replicas agreed on.

    `RuntimeError` where the batch is not the part that this replica announced.
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

    MAX_LEN pads the rows of each replica to the same number, a multiple of the attention-TP width, because
    each rank contributes an equal slice of them. SUM_LEN keeps exact rows. Tokens [3, 5] over an attention-TP
    width of 2 become 6 + 6 rows, or 3 + 5.
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
    """Write the numbers of gathered rows of this forward; they stay until the next write or reset.

    `global_len` rows of all replicas and `local_len` of this one, both with padding; `global_num_tokens` is
    without.
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
    """Tokens of each replica, without padding; None where they were not stated."""
    return get_forward().dp_global_num_tokens


def is_dp_max_padding() -> bool:
    return get_forward().dp_max_padding


def get_dp_dtype() -> torch.dtype | None:
    return get_flags().dp.dtype


def get_is_extend_in_batch() -> bool:
    """Whether some replica runs a prompt in this forward."""
    return get_forward().is_extend_in_batch


def set_is_extend_in_batch(is_extend_in_batch: bool) -> None:
    get_forward().set("is_extend_in_batch", is_extend_in_batch)

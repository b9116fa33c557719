"""Attention data parallelism: public names. The collectives behind it arrive with their own layout.

Read by layers, the scheduler and the doors. ``is_dp_attention_enabled`` says what the deployment is and is
read outside model code; layers branch on ``get_parallel().attn_dp_size``. Must not keep a width or a rank.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.dp_padding import DpPaddingMode
from sglang.srt.runtime_context import get_flags, get_forward, get_parallel
from sglang.srt.runtime_context.widths import (
    attention_dp_width,
    derive_attention_ranks,
    derive_attention_widths,
)

__all__ = [
    "DpPaddingMode",
    "compute_dp_attention_world_info",
    "dp_gather_slot",
    "get_dp_device",
    "get_dp_dtype",
    "get_dp_global_num_tokens",
    "get_dp_hidden_size",
    "get_global_dp_buffer",
    "get_global_dp_buffer_len",
    "get_is_extend_in_batch",
    "get_local_dp_buffer",
    "get_local_dp_buffer_len",
    "initialize_dp_attention",
    "is_dp_attention_enabled",
    "is_dp_max_padding",
    "set_dp_buffer_len",
    "set_is_extend_in_batch",
    "update_dp_attention_post_scale",
]


def is_dp_attention_enabled() -> bool:
    """Whether this deployment runs attention data parallelism; stays true inside a draft's scope."""
    return get_flags().dp.enabled


def compute_dp_attention_world_info(
    enable_dp_attention: bool, tp_rank: int, tp_size: int, dp_size: int, attn_cp_size: int = 1
) -> tuple[int, int, int, int]:
    """``(attn_tp_rank, attn_tp_size, attn_dp_rank, attn_dp_size)`` of one tensor rank; the last two are 0,
    1 without it."""
    replicas = attention_dp_width(enable_dp_attention=enable_dp_attention, dp_size=dp_size)
    widths = derive_attention_widths(tp_size=tp_size, attn_cp_size=attn_cp_size, attn_dp_size=replicas)
    attn_tp_size = widths["attn_tp_size"]
    ranks = derive_attention_ranks(tp_rank=tp_rank, attn_tp_size=attn_tp_size, attn_cp_size=attn_cp_size)
    return ranks.attn_tp_rank, attn_tp_size, ranks.attn_dp_rank, replicas


def initialize_dp_attention(*, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Stamp this process's replica and record what a gathered row is.

    A process that published a rank bundle has the same stamp already.
    """
    parallel = get_parallel()
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
    """The buffer that gathered rows land in: its metadata is fixed at start, its length changes per
    forward."""

    @staticmethod
    def set_metadata(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        dp = get_flags().dp
        dp.hidden_size, dp.dtype, dp.device = hidden_size, dtype, device

    @staticmethod
    def empty(rows: int | None) -> torch.Tensor:
        dp = get_flags().dp
        if rows is None or dp.hidden_size is None:
            missing = "set_dp_buffer_len" if dp.hidden_size is not None else "initialize_dp_attention"
            raise RuntimeError(f"the gathered buffer has no size yet; call {missing}() first")
        return torch.empty((rows, dp.hidden_size), dtype=dp.dtype, device=dp.device)


def set_dp_buffer_len(
    global_len: int, local_len: int, max_padding: bool, global_num_tokens: list[int] | None = None
) -> None:
    """Sizes of this forward's gathered buffer; they stay until the next write or reset."""
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
    """Tokens per replica, None where the padding made them equal."""
    return get_forward().dp_global_num_tokens


def is_dp_max_padding() -> bool:
    return get_forward().dp_max_padding


def get_global_dp_buffer() -> torch.Tensor:
    """Room for the rows of all replicas: [global length, hidden size]."""
    return _DpGatheredBufferWrapper.empty(get_global_dp_buffer_len())


def get_local_dp_buffer() -> torch.Tensor:
    """Room for this replica's rows: [local length, hidden size]."""
    return _DpGatheredBufferWrapper.empty(get_local_dp_buffer_len())


def get_dp_dtype() -> Any:
    return get_flags().dp.dtype


def get_dp_device() -> Any:
    return get_flags().dp.device


def get_dp_hidden_size() -> int | None:
    return get_flags().dp.hidden_size


def get_is_extend_in_batch() -> bool:
    """Whether some replica of this forward runs a prompt; stays until the next write."""
    return get_forward().is_extend_in_batch


def set_is_extend_in_batch(is_extend_in_batch: bool) -> None:
    get_forward().set("is_extend_in_batch", is_extend_in_batch)

"""Gathers the rows of all attention-DP replicas before work of the whole tensor group, and scatters the sums.

Called by the layer communicator (hidden states) and the logits processor (rows to score), equally often on
every rank of the tensor group. Must not decide the padding (`dp_padding`) or the layout (the context).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.distributed.communication_op import (
    attention_tensor_parallel_all_gather,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_gatherv,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_reduce_scatter,
    tensor_model_parallel_reduce_scatterv,
)
from sglang.srt.runtime_context import get_forward, get_parallel

__all__ = ["dp_gather", "dp_scatter", "gather_rows"]


def dp_gather(local_rows: torch.Tensor) -> torch.Tensor:
    """[own tokens, hidden] -> [rows of all replicas, hidden], in replica order, as this forward was sized.

    One replica: the given rows. Padding rows (MAX_LEN) are zero.
    """
    if get_parallel().attn_dp_size == 1:
        return local_rows
    counts, padded = _forward_sizes()
    if padded is None:
        return gather_rows(local_rows, counts)
    _check_rows("dp_gather", local_rows, counts[get_parallel().attn_dp_rank])
    return _gather_padded(local_rows, padded)


def dp_scatter(global_partial: torch.Tensor) -> torch.Tensor:
    """Sum [rows of all replicas, hidden] over the tensor group -> [own tokens, hidden].

    Each rank passes its term, from weights that are cut over the group. With one replica the term is returned
    unsummed: the caller sums it.
    """
    if get_parallel().attn_dp_size == 1:
        return global_partial
    counts, padded = _forward_sizes()
    _check_rows("dp_scatter", global_partial, get_forward().dp_global_buffer_len)
    if padded is None:
        return _scatter_rows(global_partial, counts)
    own = _scatter_padded(global_partial)
    return own[: counts[get_parallel().attn_dp_rank]]


def gather_rows(local_rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The rows of all replicas, `counts[r]` of replica r, on every rank: [sum(counts), width]."""
    parallel = get_parallel()
    replica = parallel.attn_dp_rank
    _check_rows("gather_rows", local_rows, counts[replica])
    if sum(counts) == 0:
        return local_rows
    if parallel.attn_dp_size == parallel.tp_size:
        return tensor_model_parallel_all_gatherv(local_rows.contiguous(), counts)
    # The ranks of a replica have the same rows: the leader adds them, the others add zeros.
    rows = local_rows.new_zeros(sum(counts), local_rows.shape[1])
    if parallel.is_attn_tp_leader:
        first = sum(counts[:replica])
        rows[first : first + counts[replica]] = local_rows
    return tensor_model_parallel_all_reduce(rows)


def _scatter_rows(partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    parallel = get_parallel()
    if sum(counts) == 0:
        return partial
    if parallel.attn_dp_size == parallel.tp_size:
        return tensor_model_parallel_reduce_scatterv(partial, counts)
    first = sum(counts[: parallel.attn_dp_rank])
    return tensor_model_parallel_all_reduce(partial)[first : first + counts[parallel.attn_dp_rank]]


def _gather_padded(local_rows: torch.Tensor, length: int) -> torch.Tensor:
    """Each rank of a replica contributes its slice of the `length` padded rows.

    `tp_rank` counts replicas first and then the ranks inside, so the gathered slices are in order.
    """
    if length == 0:
        return local_rows
    parallel = get_parallel()
    share = length // parallel.attn_tp_size
    first = parallel.attn_tp_rank * share
    piece = local_rows[first : first + share]
    if piece.shape[0] < share:
        whole = local_rows.new_zeros(share, local_rows.shape[1])
        whole[: piece.shape[0]] = piece
        piece = whole
    return tensor_model_parallel_all_gather(piece.contiguous(), dim=0)


def _scatter_padded(partial: torch.Tensor) -> torch.Tensor:
    if partial.shape[0] == 0:
        return partial
    return attention_tensor_parallel_all_gather(tensor_model_parallel_reduce_scatter(partial, dim=0), dim=0)


def _forward_sizes() -> tuple[list[int], int | None]:
    """Tokens of each replica, and the padded rows of one (None where rows are exact)."""
    forward = get_forward()
    counts, length = forward.dp_global_num_tokens, forward.dp_local_buffer_len
    if counts is None or length is None:
        raise RuntimeError(
            "rows move between attention-DP replicas only inside a forward that was sized; call "
            "prepare_dp_forward(batch) or size_dp_forward(counts, mode) first"
        )
    return counts, length if forward.dp_max_padding else None


def _check_rows(what: str, rows: torch.Tensor, expected: int | None) -> None:
    if rows.shape[0] != expected:
        raise RuntimeError(
            f"{what} got {rows.shape[0]} rows where this forward was sized for {expected}; size it from the "
            "batch that runs"
        )

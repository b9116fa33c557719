"""Owns the collectives that layers call, named by the group they run over.

Read by layers and models. Each takes its group from the context in the scope that runs, so a draft's layers
reduce over the draft's group; must not keep a group. One rank wide means the tensor itself, without asking
any group.
"""

from collections.abc import Sequence

import torch

from sglang.srt.runtime_context import get_parallel

__all__ = [
    "attention_tensor_parallel_all_gather",
    "attention_tensor_parallel_all_reduce",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_gatherv",
    "tensor_model_parallel_all_reduce",
    "tensor_model_parallel_reduce_scatter",
    "tensor_model_parallel_reduce_scatterv",
]


def tensor_model_parallel_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    parallel = get_parallel()
    return tensor if parallel.tp_size == 1 else parallel.tp_group.all_reduce(tensor)


def tensor_model_parallel_all_gather(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    parallel = get_parallel()
    return tensor if parallel.tp_size == 1 else parallel.tp_group.all_gather(tensor, dim)


def tensor_model_parallel_all_gatherv(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Rows of all ranks, one after another; rank r brings `sizes[r]` of them, which may be none."""
    parallel = get_parallel()
    return tensor if parallel.tp_size == 1 else parallel.tp_group.all_gatherv(tensor, sizes)


def tensor_model_parallel_reduce_scatter(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    parallel = get_parallel()
    return tensor if parallel.tp_size == 1 else parallel.tp_group.reduce_scatter(tensor, dim)


def tensor_model_parallel_reduce_scatterv(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Sum of the ranks' rows; rank r keeps `sizes[r]` of them."""
    parallel = get_parallel()
    return tensor if parallel.tp_size == 1 else parallel.tp_group.reduce_scatterv(tensor, sizes)


def attention_tensor_parallel_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    parallel = get_parallel()
    return tensor if parallel.attn_tp_size == 1 else parallel.attn_tp_group.all_reduce(tensor)


def attention_tensor_parallel_all_gather(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    parallel = get_parallel()
    return tensor if parallel.attn_tp_size == 1 else parallel.attn_tp_group.all_gather(tensor, dim)

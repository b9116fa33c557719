"""Moves hidden states between attention-DP replicas and the tensor group. The collectives arrive with
attention DP.

Read by the layer communicator. Must not decide a padding (``dp_padding``) or a layout (the context).
"""

from __future__ import annotations

import torch

from sglang.srt.runtime_context import get_parallel

__all__ = ["dp_gather", "dp_scatter"]


def dp_gather(local_rows: torch.Tensor) -> torch.Tensor:
    """Rows of all replicas, in replica order; with one replica they are this rank's own."""
    return _one_replica_only(local_rows, "dp_gather")


def dp_scatter(global_rows: torch.Tensor) -> torch.Tensor:
    """This replica's rows out of the gathered ones; with one replica all of them."""
    return _one_replica_only(global_rows, "dp_scatter")


def _one_replica_only(rows: torch.Tensor, what: str) -> torch.Tensor:
    replicas = get_parallel().attn_dp_size
    if replicas > 1:
        raise NotImplementedError(
            f"{what} over {replicas} attention-DP replicas arrives with attention data parallelism; "
            "serve with --attn-dp-size 1 until then"
        )
    return rows

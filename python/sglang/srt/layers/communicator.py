"""Which collective runs between the parts of a model: before and after the feed-forward, around the head.

Called by decoder layers and the logits processor. It reads the context at each call, so that a draft which
owns its attention sums over its own group. State is in the forward flags and must not be kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce
from sglang.srt.layers.exchange.dp_gather import dp_gather, dp_scatter
from sglang.srt.runtime_context import get_forward, get_parallel
from sglang.srt.runtime_context.forward import AttentionInputs

__all__ = [
    "AttnTpContext",
    "gather_mlp_rows",
    "get_attn_tp_context",
    "head_axis",
    "head_spans_replicas",
    "reduce_mlp_rows",
]


def gather_mlp_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows that a feed-forward which is cut over the tensor group needs.

    With attention data parallelism the rows of all replicas, else the given ones, which every rank has.
    """
    return dp_gather(rows)


def reduce_mlp_rows(partial: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' terms of the feed-forward; gives the rows that this rank's attention goes on with."""
    if get_parallel().attn_dp_size > 1:
        return dp_scatter(partial)
    return tensor_model_parallel_all_reduce(partial)


def head_axis() -> Literal["tp", "attn_tp"]:
    """The group over which the vocabulary of the head is cut; asked when a model is built."""
    parallel = get_parallel()
    return "attn_tp" if parallel.attn_dp_size > 1 and parallel.enable_dp_lm_head else "tp"


def head_spans_replicas() -> bool:
    """Whether all attention-DP replicas take part in a call of the head."""
    return get_parallel().attn_dp_size > 1 and head_axis() == "tp"


class AttnTpContext:
    """Whether the inputs of attention are scattered over its tensor group; no layout does that yet."""

    @property
    def input_scattered(self) -> bool:
        return get_forward().attn_input_scattered

    def use_input_scattered(self, forward_batch: ForwardBatch) -> bool:
        """False: no layout that is served does."""
        return False

    @contextmanager
    def maybe_input_scattered(self, forward_batch: ForwardBatch) -> Iterator[None]:
        """The scope of one forward; attention inputs that a layer left are dropped when it closes."""
        scattered = self.use_input_scattered(forward_batch)
        with get_forward().scoped(attn_input_scattered=scattered, attn_inputs=None):
            yield

    def set_attn_inputs(self, attn_inputs: AttentionInputs) -> None:
        get_forward().set("attn_inputs", attn_inputs)

    def fetch_qkv_latent(self) -> torch.Tensor:
        """The latent of the attention inputs that a layer left."""
        attn_inputs = get_forward().attn_inputs
        if attn_inputs is None:
            raise RuntimeError("no attention inputs were left in this forward; call set_attn_inputs() first")
        return attn_inputs.fetch_qkv_latent()


_ATTN_TP_CONTEXT = AttnTpContext()


def get_attn_tp_context() -> AttnTpContext:
    return _ATTN_TP_CONTEXT

"""Which collective sits between the parts of a model: before and after the feed-forward, around the head.

Read by decoder layers and the logits processor. It decides from the scope that runs, at the moment of the
call, so that a draft that owns its attention sums over its own group; state lives in the context's forward
flags and must not be kept here. Nothing scatters attention inputs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce
from sglang.srt.layers.exchange.dp_gather import dp_gather, dp_scatter
from sglang.srt.runtime_context import get_forward, get_parallel

__all__ = [
    "AttnTpContext",
    "gather_mlp_rows",
    "get_attn_tp_context",
    "head_axis",
    "head_spans_replicas",
    "reduce_mlp_rows",
]


def gather_mlp_rows(rows: torch.Tensor) -> torch.Tensor:
    """What a feed-forward that is cut over the tensor group must see: with attention data parallelism the
    rows of all replicas, else the rows that every rank has already.
    """
    return dp_gather(rows)


def reduce_mlp_rows(partial: torch.Tensor) -> torch.Tensor:
    """This rank's term of the feed-forward -> the sum, for the rows that attention goes on with."""
    if get_parallel().attn_dp_size > 1:
        return dp_scatter(partial)
    return tensor_model_parallel_all_reduce(partial)


def head_axis() -> Literal["tp", "attn_tp"]:
    """The group over which the head's vocabulary is cut, asked when a model is built."""
    parallel = get_parallel()
    return "attn_tp" if parallel.attn_dp_size > 1 and parallel.enable_dp_lm_head else "tp"


def head_spans_replicas() -> bool:
    """Whether a call of the head is one that every attention-DP replica takes part in."""
    return get_parallel().attn_dp_size > 1 and head_axis() == "tp"


class AttnTpContext:
    """Whether the rows that attention gets are scattered over its tensor group, and who fetches them."""

    @property
    def input_scattered(self) -> bool:
        return get_forward().attn_input_scattered

    def use_input_scattered(self, forward_batch: Any) -> bool:
        """Never: no layout that is served scatters attention inputs."""
        return False

    @contextmanager
    def maybe_input_scattered(self, forward_batch: Any) -> Iterator[None]:
        """The scope of one forward. What a layer left as attention input is dropped when it closes."""
        scattered = self.use_input_scattered(forward_batch)
        with get_forward().scoped(attn_input_scattered=scattered, attn_inputs=None):
            yield

    def set_attn_inputs(self, attn_inputs: Any) -> None:
        get_forward().set("attn_inputs", attn_inputs)

    def fetch_qkv_latent(self) -> Any:
        """The latent of the inputs that the layer left, computed by whoever left them."""
        attn_inputs = get_forward().attn_inputs
        if attn_inputs is None:
            raise RuntimeError("no attention inputs were left in this forward; call set_attn_inputs() first")
        return attn_inputs.fetch_qkv_latent()


_ATTN_TP_CONTEXT = AttnTpContext()


def get_attn_tp_context() -> AttnTpContext:
    return _ATTN_TP_CONTEXT

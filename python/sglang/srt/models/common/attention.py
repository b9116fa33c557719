"""Owns the self-attention block of a decoder layer: projection, rotation, attention, output projection.

Made by architectures. It must not know pages or batches; those pass through to the back end.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.configs.architectures.decoder import DecoderShape
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import apply_rotary
from sglang.srt.layers.rotary_embedding.base import CosSin
from sglang.srt.layers.weights.head_share import HeadShare
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger(__name__)


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    `in_features` is the width of its input, the hidden size if nothing is said.
    """

    def __init__(
        self,
        prefix: str,
        config: DecoderShape,
        quant: QuantizationConfig,
        layer_id: int,
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        dim = self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            prefix,
            in_features or config.hidden_size,
            dim,
            config.num_heads,
            config.num_kv_heads,
            method=quant.linear_method(f"{prefix}.qkv_proj"),
            dtype=dtype,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            f"{prefix}.o_proj",
            config.num_heads * dim,
            config.hidden_size,
            method=quant.linear_method(f"{prefix}.o_proj"),
            dtype=dtype,
            bias=config.attention_bias,
            axis="attn_tp",
            share=self.qkv_proj.heads.q.times(dim),
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attn = RadixAttention(self.num_heads, dim, dim**-0.5, self.num_kv_heads, layer_id)
        if layer_id == 0:
            _log_share(self.qkv_proj.heads)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext) -> torch.Tensor:
        rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(x.shape[0], rotated + self.num_kv_heads, self.head_dim)
        qk = apply_rotary(self.norm_heads(heads[:, :rotated]), cos_sin)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, rotated:]
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, ctx))
        return out

    def norm_heads(self, qk: torch.Tensor) -> torch.Tensor:
        """Query and key heads [rows, heads, head_dim] before they are rotated; here they stay as they are."""
        return qk


def _log_share(heads: HeadShare) -> None:
    """One line at start where heads are padded or held twice; shares are equal, so one rank logs it."""
    sentence = heads.sentence()
    if sentence is not None and get_parallel().tp_rank == 0:
        logger.info("Attention heads: %s", sentence)

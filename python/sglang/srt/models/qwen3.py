"""Owns the Qwen3 architecture: the decoder with a norm over each query and key head.

Reached through the registry. Its head size is independent of the hidden size, which the config says.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.models.common.attention import SelfAttention
from sglang.srt.models.common.decoder import DecoderForCausalLM


class Qwen3Attention(SelfAttention):
    """Self-attention with an RMSNorm over each query and key head."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        quant: QuantizationConfig,
        layer_id: int,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(prefix, config, quant, layer_id, dtype=dtype)
        self.q_norm = RMSNorm(f"{prefix}.q_norm", self.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(f"{prefix}.k_norm", self.head_dim, config.rms_norm_eps, dtype=dtype)

    def norm_heads(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        normed_q, normed_k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        return qk if normed_q is q else torch.cat((normed_q, normed_k), dim=1)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with query and key norms."""

    def make_attention(self, prefix: str, layer_id: int) -> Qwen3Attention:
        return Qwen3Attention(prefix, self.config, self.quant, layer_id, dtype=self.dtype)

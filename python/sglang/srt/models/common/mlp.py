"""Owns the gated feed-forward block: gate and up in one product, activation, down.

Read by decoder layers. It must not know which architecture it serves.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.configs.architectures.decoder import DecoderShape
from sglang.srt.layers.activation import gated_activation
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), cut over the tensor group.

    Every rank brings the same rows and gets its own term of the sum, which the caller takes
    (`communicator.reduce_mlp_rows`).
    """

    def __init__(
        self, prefix: str, config: DecoderShape, quant: QuantizationConfig, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            prefix,
            hidden,
            inner,
            method=quant.linear_method(f"{prefix}.gate_up_proj"),
            dtype=dtype,
            bias=bias,
        )
        self.down_proj = RowParallelLinear(
            f"{prefix}.down_proj",
            inner,
            hidden,
            method=quant.linear_method(f"{prefix}.down_proj"),
            dtype=dtype,
            bias=bias,
            reduce_results=False,
        )
        self.act = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        term: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return term

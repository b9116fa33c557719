"""Owns the EAGLE head (EAGLE-1 and 2): it continues the target's last hidden rows, one token further.

Reached through the registry of drafts (`LlamaForCausalLMEagle`). Row p reads the target's hidden row p and
the embedding of token p + 1, and predicts token p + 2. Embedding and head are the target's; they must not be
in this model's own weights. Source: arXiv 2401.15077.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.configs.architectures.decoder import DecoderShape
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.layers.communicator import gather_mlp_rows, reduce_mlp_rows
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedConfig
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import CosSin
from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger
from sglang.srt.models.common.attention import SelfAttention
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.common.mlp import GatedMLP
from sglang.srt.models.drafts.borrowed import borrowed_embedding, copied_head, head_can_be_borrowed


class EagleLayer(nn.Module):
    """A decoder layer; the first one has no norm before its attention."""

    def __init__(self, config: DecoderShape, layer_id: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        prefix, quant = f"layers.{layer_id}", UnquantizedConfig()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: RMSNorm | None = None
        if layer_id > 0:
            self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", hidden, eps, dtype=dtype)
        self.self_attn = SelfAttention(f"{prefix}.self_attn", config, quant, layer_id, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(
            f"{prefix}.post_attention_layernorm", hidden, eps, dtype=dtype
        )
        self.mlp = GatedMLP(f"{prefix}.mlp", config, quant, dtype=dtype)

    def forward(self, stream: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext) -> torch.Tensor:
        """The residual stream [rows, hidden] after this layer; the given one is left alone."""
        x = stream if self.input_layernorm is None else self.input_layernorm(stream)
        if ctx.batch.forward_mode is not ForwardMode.IDLE:
            stream = stream + self.self_attn(x, cos_sin, ctx)
        rows = gather_mlp_rows(self.post_attention_layernorm(stream))
        return stream + reduce_mlp_rows(self.mlp(rows))


class LlamaForCausalLMEagle(nn.Module):
    """ids, positions and the hidden rows that the batch brings -> logits, and the rows to go on from."""

    def __init__(self, draft: DraftConfig, target: DecoderForCausalLM, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert draft.head is not None  # a draft of this architecture has one
        config, head = draft.model, draft.head
        self.hidden_size = config.hidden_size
        self.feature_width = head.feature_width
        self._dtype = dtype
        self.fc = ReplicatedLinear(
            "fc",
            config.hidden_size + head.target_hidden_size,
            config.hidden_size,
            method=UnquantizedConfig().linear_method("fc"),
            dtype=dtype,
            bias=head.fc_bias,
        )
        layers = [EagleLayer(config, i, dtype=dtype) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        attention = layers[0].self_attn
        self._kv_shape = len(layers), attention.num_kv_heads, attention.head_dim
        self.rotary = get_rope(config.head_dim, config.rope_theta, config.rope_scaling, dtype)
        # In a tuple, so that the target's weights do not count as this model's.
        self._embedding = (borrowed_embedding(target),)
        self.own_head = None if head_can_be_borrowed(target.lm_head) else copied_head(target)
        self._head = (self.own_head or target.lm_head,)
        self.vocab_size = self._head[0].vocab_size
        self.logits_processor = LogitsProcessor(self.vocab_size)

    def forward(self, ctx: ForwardContext) -> LogitsProcessorOutput:
        """`hidden` of the answer is the stream of all rows, which the next step reads."""
        batch = ctx.batch
        if batch.forward_mode is ForwardMode.IDLE:
            stream = torch.empty(0, self.hidden_size, dtype=self._dtype, device=batch.input_ids.device)
        else:
            assert batch.spec is not None and batch.spec.hidden is not None
            embedded = self._embedding[0](batch.input_ids)
            stream = self.fc(torch.cat((embedded, batch.spec.hidden), dim=-1))
        cos_sin = self.rotary(batch.positions)
        for layer in self.layers:
            stream = layer(stream, cos_sin, ctx)
        output = self.logits_processor(stream, self._head[0], batch)
        output.hidden = stream
        return output

    @staticmethod
    def target_ids(draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids that this draft proposes: it has the target's vocabulary."""
        return draft_ids

    def kv_shape(self) -> tuple[int, int, int]:
        """(layers, key/value heads, head size) that this rank caches, padding heads included."""
        return self._kv_shape

    def load_weights(self, items: Iterable[WeightItem]) -> None:
        """Fill every parameter exactly once; a tensor that none is made of is refused."""
        WeightLedger(self.parameters()).fill_all(items)

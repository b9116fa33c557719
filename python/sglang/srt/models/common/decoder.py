"""Owns the decoder-only model: embedding, layers over one residual stream, last norm, head, loading.

Read by architecture files, which override the makers of the parts in which they differ. It must not know back
ends, pages or requests, nor file formats: weights arrive as items under Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.communicator import gather_mlp_rows, head_axis, reduce_mlp_rows
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import CosSin
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger
from sglang.srt.models.common.attention import SelfAttention
from sglang.srt.models.common.mlp import GatedMLP


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    An architecture that places norms otherwise makes a subclass of this in `make_layer`. Attention runs over
    this replica's rows, the feed-forward over those of all attention-DP replicas: an idle replica has no
    rows, skips the first and takes part in the second.
    """

    def __init__(
        self, prefix: str, config: ModelConfig, attention: nn.Module, mlp: nn.Module, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", hidden, eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(
            f"{prefix}.post_attention_layernorm", hidden, eps, dtype=dtype
        )
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext
    ) -> torch.Tensor:
        """Add `x` to `residual` in place and return what the next layer adds.

        `x` is what the layer before returned, None for the first layer.
        """
        norm = self.input_layernorm
        x = norm(residual) if x is None else norm.add(x, residual)
        if ctx.batch.forward_mode is not ForwardMode.IDLE:
            x = self.self_attn(x, cos_sin, ctx)
        rows = gather_mlp_rows(self.post_attention_layernorm.add(x, residual))
        return reduce_mlp_rows(self.mlp(rows))


class DecoderModel(nn.Module):
    """ids and positions [num_tokens] -> hidden states after the last norm [num_tokens, hidden].

    The second value is what a draft reads, where the batch captures hidden rows: the same rows, or the
    residual stream after each of `aux_layers` (0-based numbers of layers), side by side.
    """

    def __init__(self, config: ModelConfig, layers: Iterable[DecoderLayer], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, dtype=dtype
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.rotary = get_rope(config.head_dim, config.rope_theta, config.rope_scaling, dtype)
        self.aux_layers: tuple[int, ...] = ()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if ctx.batch.forward_mode is ForwardMode.IDLE:  # the ranks of an idle replica look nothing up
            residual = self.norm.weight.new_empty(0, self.norm.weight.shape[0])
        else:
            residual = self.embed_tokens(input_ids)
        cos_sin = self.rotary(positions)
        captures = ctx.batch.capture_hidden
        streams: dict[int, torch.Tensor] = {}
        x = None
        for number, layer in enumerate(self.layers):
            x = layer(x, residual, cos_sin, ctx)
            if captures and number in self.aux_layers:
                streams[number] = residual + x  # the next layer adds in place
        hidden = self.norm(residual) if x is None else self.norm.add(x, residual)
        if not captures:
            return hidden, None
        return hidden, torch.cat([streams[n] for n in self.aux_layers], dim=-1) if self.aux_layers else hidden


class DecoderForCausalLM(nn.Module):
    """A decoder with a head; an architecture overrides the makers of what differs."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, quant: QuantizationConfig | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.quant = quant or UnquantizedConfig()
        self.dtype = dtype
        self.model = DecoderModel(config, map(self.make_layer, range(config.num_layers)), dtype=dtype)
        self.lm_head = ParallelLMHead(
            "lm_head",
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
            axis=head_axis(),
            method=self.quant.linear_method("lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def make_layer(self, layer_id: int) -> DecoderLayer:
        """One layer of its parts; a subclass of `DecoderLayer` places the norms otherwise."""
        prefix = f"model.layers.{layer_id}"
        return DecoderLayer(
            prefix,
            self.config,
            self.make_attention(f"{prefix}.self_attn", layer_id),
            self.make_mlp(f"{prefix}.mlp", layer_id),
            dtype=self.dtype,
        )

    def make_attention(self, prefix: str, layer_id: int) -> nn.Module:
        """The attention of a layer: (x, cos_sin, ctx) -> what it adds."""
        return SelfAttention(prefix, self.config, self.quant, layer_id, dtype=self.dtype)

    def make_mlp(self, prefix: str, layer_id: int) -> nn.Module:
        """The feed-forward of a layer: rows -> this rank's term of what it adds."""
        return GatedMLP(prefix, self.config, self.quant, dtype=self.dtype)

    def forward(self, ctx: ForwardContext) -> LogitsProcessorOutput:
        batch = ctx.batch
        hidden, captured = self.model(batch.input_ids, batch.positions, ctx)
        output = self.logits_processor(hidden, self.lm_head, batch)
        output.hidden = captured
        return output

    def set_aux_layers(self, layers: Sequence[int]) -> None:
        """Capture the residual stream after these layers instead of the last hidden rows.

        `ValueError` for a layer that the model does not have.
        """
        count = self.config.num_layers
        wrong = [number for number in layers if not 0 <= number < count]
        if wrong:
            raise ValueError(
                f"a draft reads the output of layers {list(layers)}, the target has layers 0 to {count - 1}"
            )
        self.model.aux_layers = tuple(layers)

    def limit_vocabulary(self, num_ids: int) -> None:
        """Score only the first `num_ids` ids: rows of the head beyond them stand for no token.

        Checkpoints round the head up (to a multiple of 64, say) without any token for the rows that this
        adds; they may not be drawn or listed, nor take a share of the probability.
        """
        num_ids = min(num_ids, self.config.vocab_size)
        self.lm_head.vocab_size = num_ids
        self.logits_processor = LogitsProcessor(num_ids)

    def kv_shape(self) -> tuple[int, int, int]:
        """(layers, key/value heads, head size) that this rank caches, padding heads included."""
        attentions = [module for module in self.modules() if isinstance(module, RadixAttention)]
        return len(attentions), attentions[0].num_kv_heads, attentions[0].head_dim

    def load_weights(self, items: Iterable[WeightItem]) -> None:
        """Fill every parameter exactly once; a tensor that none is made of is refused."""
        WeightLedger(self.parameters()).fill_all(items)

"""Owns the EAGLE3 draft: a layer over fused features of several target layers, with a vocabulary of its own.

Reached through the registry of drafts (`LlamaForCausalLMEagle3`). Row p reads the target's features at p (or,
from the second step on, its own stream) and the embedding of token p + 1, and predicts token p + 2. The
embedding is the target's. Source: arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.batch.forward_context import ForwardContext
from sglang.srt.configs.architectures.decoder import DecoderShape
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.layers.communicator import gather_mlp_rows, head_axis, reduce_mlp_rows
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedConfig
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import CosSin
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.layers.weights.parameter import LoadableParameter, Place, WeightItem, WeightLedger
from sglang.srt.models.common.attention import SelfAttention
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.common.mlp import GatedMLP
from sglang.srt.models.drafts.borrowed import borrowed_embedding, copied_head, head_can_be_borrowed


class Eagle3Layer(nn.Module):
    """The first layer attends over [normed embedding | normed stream]; later ones over the stream alone.

    The residual stream begins with the features, never with the embedding.
    """

    def __init__(self, config: DecoderShape, layer_id: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        prefix, quant = f"layers.{layer_id}", UnquantizedConfig()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: RMSNorm | None = None
        if layer_id == 0:
            self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", hidden, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(f"{prefix}.hidden_norm", hidden, eps, dtype=dtype)
        self.self_attn = SelfAttention(
            f"{prefix}.self_attn",
            config,
            quant,
            layer_id,
            dtype=dtype,
            in_features=2 * hidden if layer_id == 0 else hidden,
        )
        self.post_attention_layernorm = RMSNorm(
            f"{prefix}.post_attention_layernorm", hidden, eps, dtype=dtype
        )
        self.mlp = GatedMLP(f"{prefix}.mlp", config, quant, dtype=dtype)

    def forward(
        self, embedded: torch.Tensor, stream: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext
    ) -> torch.Tensor:
        """The stream [rows, hidden] after this layer; the given one is left alone."""
        x = self.hidden_norm(stream)
        if self.input_layernorm is not None:
            x = torch.cat((self.input_layernorm(embedded), x), dim=-1)
        if ctx.batch.forward_mode is not ForwardMode.IDLE:
            stream = stream + self.self_attn(x, cos_sin, ctx)
        rows = gather_mlp_rows(self.post_attention_layernorm(stream))
        return stream + reduce_mlp_rows(self.mlp(rows))


class LlamaForCausalLMEagle3(nn.Module):
    """ids, positions and the target's features -> logits over its own vocabulary, and its stream."""

    draft_to_target: LoadableParameter | None

    def __init__(self, draft: DraftConfig, target: DecoderForCausalLM, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert draft.head is not None  # a draft of this architecture has one
        config, head = draft.model, draft.head
        self.hidden_size = config.hidden_size
        self.feature_width = head.feature_width
        self._target_vocab_size = config.vocab_size
        #: How many of them are tokens: the others only round the target's head up.
        self._num_ids = target.lm_head.vocab_size
        self._no_tokens: torch.Tensor | None = None  # ids of the draft that stand for none
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width, pieces = head.feature_width, max(len(head.aux_layers), 1)
        self.fc: ReplicatedLinear | None = None
        if head.fc_inputs is not None:
            method = UnquantizedConfig().linear_method("fc")
            self.fc = ReplicatedLinear(
                "fc", head.fc_inputs, hidden, method=method, dtype=dtype, bias=head.fc_bias
            )
        self.norm_before_fc = (
            RMSNorm("norm_before_fc", width, eps, dtype=dtype) if head.norm_before_fc else None
        )
        self.fc_norm = nn.ModuleList(
            RMSNorm(f"fc_norm.{i}", width // pieces, eps, dtype=dtype)
            for i in range(pieces if head.norm_each_capture else 0)
        )
        layers = [Eagle3Layer(config, i, dtype=dtype) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        attention = layers[0].self_attn
        self._kv_shape = len(layers), attention.num_kv_heads, attention.head_dim
        self.norm = RMSNorm("norm", hidden, eps, dtype=dtype)
        self.norm_output = head.norm_output
        self.rotary = get_rope(config.head_dim, config.rope_theta, config.rope_scaling, dtype)
        # In a tuple, so that the target's weights do not count as this model's.
        self._embedding = (borrowed_embedding(target),)
        self.own_head: ParallelLMHead | None = None
        self.draft_to_target = None
        size = head.draft_vocab_size
        if size is not None:
            self.own_head = ParallelLMHead("lm_head", size, hidden, dtype=dtype, axis=head_axis())
            if draft.has_reduced_vocabulary:
                offsets = torch.empty(size, dtype=torch.int64)
                self.draft_to_target = LoadableParameter(offsets, [Place.full("d2t", (size,))])
            else:
                self.own_head.vocab_size = self._num_ids
        elif head.tied_head and not target.config.tie_word_embeddings:
            self.own_head = copied_head(target, of_table=True)
        elif not head_can_be_borrowed(target.lm_head):
            self.own_head = copied_head(target)
        self._head = (self.own_head or target.lm_head,)
        self.vocab_size = self._head[0].vocab_size
        self.logits_processor = LogitsProcessor(self.vocab_size)

    def forward(self, ctx: ForwardContext) -> LogitsProcessorOutput:
        """`hidden` of the answer is what the next step reads in place of the target's features."""
        batch = ctx.batch
        if batch.forward_mode is ForwardMode.IDLE:
            stream = self.norm.weight.new_empty(0, self.hidden_size)
            embedded = stream
        else:
            assert batch.spec is not None and batch.spec.hidden is not None
            stream = self._fused(batch.spec.hidden)
            embedded = self._embedding[0](batch.input_ids)
        cos_sin = self.rotary(batch.positions)
        for layer in self.layers:
            stream = layer(embedded, stream, cos_sin, ctx)
        normed = self.norm(stream)
        output = self.logits_processor(normed, self._head[0], batch)
        if self._no_tokens is not None:
            output.logits.index_fill_(1, self._no_tokens, float("-inf"))
        output.hidden = normed if self.norm_output else stream
        return output

    def _fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's features as a stream; the draft's own stream has that width already."""
        if self.fc is None or hidden.shape[-1] == self.hidden_size:
            return hidden
        if len(self.fc_norm):
            pieces = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat(
                [norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1
            )
        if self.norm_before_fc is not None:
            hidden = self.norm_before_fc(hidden)
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids that this draft proposes: `d2t` holds how far each lies above its own."""
        if self.draft_to_target is None:
            return draft_ids
        return draft_ids + self.draft_to_target[draft_ids]

    def kv_shape(self) -> tuple[int, int, int]:
        """(layers, key/value heads, head size) that this rank caches, padding heads included."""
        return self._kv_shape

    def load_weights(self, items: Iterable[WeightItem]) -> None:
        """Fill every parameter exactly once; a tensor that none is made of is refused."""
        WeightLedger(self.parameters()).fill_all(items)
        self._check_token_map()

    def _check_token_map(self) -> None:
        """Refuse a map of other numbers than offsets, with which the draft would never be right."""
        if self.draft_to_target is None:
            return
        device = self.draft_to_target.device
        ids = self.target_ids(torch.arange(len(self.draft_to_target), device=device)).tolist()
        if min(ids) < 0 or max(ids) >= self._target_vocab_size or len(set(ids)) < len(ids):
            raise ValueError(
                f"the draft's tensor d2t leads to the tokens {min(ids)} to {max(ids)}, {len(set(ids))} "
                f"different ones of {len(ids)}, and the model has {self._target_vocab_size}: it must hold "
                "offsets (target id minus draft id); convert the draft again"
            )
        no_tokens = [draft_id for draft_id, token_id in enumerate(ids) if token_id >= self._num_ids]
        if no_tokens:
            self._no_tokens = torch.tensor(no_tokens, device=device)

"""Owns the target as training sees it: a plain torch Llama with a static KV cache, and what it captures.

Read by generation, by the first weights of a draft and by the tests. It is a second, independent form of a
model that the engine also serves; it must not grow features that training does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import open_checkpoint


@dataclass(frozen=True, slots=True)
class Captured:
    """What the target leaves behind for each position that it read.

    `features` [..., len(aux_layers) * hidden] is the residual stream after those layers, in their order;
    `final` [..., hidden] is the stream after the last norm, whose product with the head are the logits.
    """

    features: Tensor
    final: Tensor


def rope_table(length: int, head_dim: int, theta: float, first: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, head_dim] in fp32 for positions first, first + 1, ... (Llama's halves)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(first, first + length, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., head_dim]; the tables broadcast against it, the arithmetic is fp32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with its statistics in fp32; the result has the dtype of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class PlainTarget:
    """A Llama decoder over one batch of rows, each row with a static KV cache of `max_len` positions."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], aux_layers: tuple[int, ...]) -> None:
        _refuse_other_models(config, aux_layers)
        self.config = config
        self.aux_layers = aux_layers
        self.weights = weights
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["model.norm.weight"]
        self.dtype = self.embedding.dtype
        self._layers = [self._fused(index) for index in range(config.num_layers)]

    @classmethod
    def from_path(
        cls, path: str | Path, dtype: torch.dtype, aux_layers: tuple[int, ...] | None = None
    ) -> PlainTarget:
        """The target of an alias, a folder or a GGUF file, as the engine's own loader reads it."""
        config = ModelConfig.from_path(path)
        checkpoint = open_checkpoint(config, "auto", dtype)
        weights = {item.name: item.load(dtype, 0, 0, item.shape[0]) for item in checkpoint.items}
        layers = default_aux_layers(config.num_layers) if aux_layers is None else aux_layers
        return cls(checkpoint.config, weights, layers)

    def layer_weight(self, layer: int, name: str) -> Tensor:
        """One tensor of a layer under its Hugging Face name, such as "mlp.up_proj.weight"."""
        return self.weights[f"model.layers.{layer}.{name}"]

    def _fused(self, index: int) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return self.layer_weight(index, name)

        return {
            "qkv": torch.cat([get(f"self_attn.{part}_proj.weight") for part in "qkv"]),
            "o": get("self_attn.o_proj.weight"),
            "gate_up": torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]),
            "down": get("mlp.down_proj.weight"),
            "before_attention": get("input_layernorm.weight"),
            "before_mlp": get("post_attention_layernorm.weight"),
        }

    def empty_cache(self, rows: int, max_len: int) -> Tensor:
        """[layers, 2, rows, kv heads, max_len, head_dim]: keys and values, zeros."""
        c = self.config
        return torch.zeros(c.num_layers, 2, rows, c.num_kv_heads, max_len, c.head_dim, dtype=self.dtype)

    @torch.inference_mode()
    def forward(self, ids: Tensor, starts: Tensor, cache: Tensor, rows: Tensor | None = None) -> Captured:
        """Read `ids` [batch, width] into the cache and return what was captured at each of them.

        The first token of row b stands at position `starts[b]`. Row b uses row `rows[b]` of the cache;
        without `rows` the batch is all rows in order. Shorter rows are padded at the end: what is captured
        there means nothing, and the row's next tokens overwrite the padding's keys before they are seen.
        """
        c = self.config
        width = ids.shape[1]
        positions = starts[:, None] + torch.arange(width)  # [batch, width]
        total = int(positions.max()) + 1
        cos, sin = (
            table[positions][:, None] for table in rope_table(cache.shape[4], c.head_dim, c.rope_theta)
        )
        # [batch * kv heads, group * width, total]: the query heads of a group share their keys.
        unseen = torch.arange(total) > positions[:, :, None]
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
        group = c.num_heads // c.num_kv_heads
        mask = mask[:, None, None].expand(-1, c.num_kv_heads, group, -1, -1).reshape(-1, group * width, total)
        stream = F.embedding(ids, self.embedding)
        features = []
        for index, layer in enumerate(self._layers):
            normed = rms_norm(stream, layer["before_attention"], c.rms_norm_eps)
            stream = stream + self._attention(layer, normed, (cos, sin), mask, cache[index], rows, positions)
            normed = rms_norm(stream, layer["before_mlp"], c.rms_norm_eps)
            gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
            stream = stream + F.linear(F.silu(gate) * up, layer["down"])
            if index in self.aux_layers:
                features.append(stream)
        return Captured(torch.cat(features, dim=-1), rms_norm(stream, self.norm, c.rms_norm_eps))

    def _attention(
        self,
        layer: dict[str, Tensor],
        normed: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: Tensor,
        rows: Tensor | None,
        positions: Tensor,
    ) -> Tensor:
        c = self.config
        batch, width, _ = normed.shape
        heads = F.linear(normed, layer["qkv"]).view(batch, width, -1, c.head_dim).transpose(1, 2)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        q, k = rotate(q, *turn), rotate(k, *turn)
        place = torch.arange(batch) if rows is None else rows
        cache[0][place[:, None], :, positions] = k.transpose(1, 2)
        cache[1][place[:, None], :, positions] = v.transpose(1, 2)
        total = mask.shape[-1]
        # A decode step takes all rows, so nothing has to be gathered: [rows * kv heads, total, head_dim].
        keys, values = (
            (part if rows is None else part[rows]).flatten(0, 1)[:, :total] for part in (cache[0], cache[1])
        )
        grouped = q.reshape(batch * c.num_kv_heads, -1, c.head_dim)
        # Keys on the left: with few query rows the product is more than twice as fast this way round.
        scores = torch.bmm(keys, grouped.transpose(1, 2)).transpose(1, 2).float() * c.head_dim**-0.5 + mask
        out = torch.bmm(scores.softmax(-1).to(values.dtype), values)
        out = out.view(batch, c.num_heads, width, c.head_dim).transpose(1, 2).reshape(batch, width, -1)
        return F.linear(out, layer["o"])


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Whose outputs an EAGLE3 draft reads by default: an early, a middle and a late layer.

    Raises ValueError where the target has too few layers for three different ones.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {num_layers} layers has no default aux_layers (they would be {layers}); name them"
        )
    return layers


def _refuse_other_models(config: ModelConfig, aux_layers: tuple[int, ...]) -> None:
    if config.architecture != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias:
        raise ValueError(
            f"drafts are trained for LlamaForCausalLM without biases, and the target is a "
            f"{config.architecture}; choose another target"
        )
    if config.rope_scaling is not None:
        raise ValueError("drafts are trained for targets without rope_scaling; choose another target")
    if not aux_layers or list(aux_layers) != sorted(set(aux_layers)) or aux_layers[-1] >= config.num_layers:
        raise ValueError(
            f"aux_layers are ascending ids of the target's {config.num_layers} layers, got {aux_layers}; "
            f"correct them"
        )

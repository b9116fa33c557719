"""Owns the first weights of a draft: as much as fits is borrowed from the target.

Read by the training loop. It must not train. Borrowing costs nothing and is worth 0.07 accepted tokens a
round after one epoch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train_draft.network import DraftShape
from train_draft.target import PlainTarget
from train_draft.vocabulary import DraftVocabulary

_FUSION_STD = 0.002
_EMBEDDING_STD = 0.02


def shape_for(target: PlainTarget, draft_vocab_size: int) -> DraftShape:
    """A draft with the target's widths and heads."""
    c = target.config
    return DraftShape(
        hidden_size=c.hidden_size,
        feature_size=c.hidden_size * len(target.aux_layers),
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
    )


def borrowed_weights(target: PlainTarget, vocabulary: DraftVocabulary, seed: int) -> dict[str, Tensor]:
    """Fp32 weights: the layer is the target's last one, reading the latest captured stream through `fc`.

    The half of q, k and v that reads embeddings has no counterpart in the target and starts small.
    """
    shape = shape_for(target, len(vocabulary.tokens))
    last = target.config.num_layers - 1
    hidden = shape.hidden_size
    draw = torch.Generator().manual_seed(seed)

    def borrowed(name: str) -> Tensor:
        return target.layer_weight(last, name).float().clone()

    def noise(rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * std

    fusion = noise(hidden, shape.feature_size, _FUSION_STD)
    fusion[:, -hidden:] += torch.eye(hidden)
    weights = {
        "fc.weight": fusion,
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": borrowed("input_layernorm.weight"),
        "midlayer.self_attn.o_proj.weight": borrowed("self_attn.o_proj.weight"),
        "midlayer.post_attention_layernorm.weight": borrowed("post_attention_layernorm.weight"),
        "norm.weight": target.norm.float().clone(),
        "lm_head.weight": target.head[vocabulary.tokens].float(),
    }
    for part in "qkv":
        own = borrowed(f"self_attn.{part}_proj.weight")
        weights[f"midlayer.self_attn.{part}_proj.weight"] = torch.cat(
            [noise(len(own), hidden, _EMBEDDING_STD), own], dim=1
        )
    for part in ("gate", "up", "down"):
        weights[f"midlayer.mlp.{part}_proj.weight"] = borrowed(f"mlp.{part}_proj.weight")
    return {name: weights[name] for name in shape.tensors()}

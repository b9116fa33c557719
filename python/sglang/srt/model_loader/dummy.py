"""Random weights for a model that has a config and no files.

Owns the names and shapes of a checkpoint of each served architecture, and the seed of every tensor. Read by
the loader (`--load-format dummy`). It must not depend on the order in which tensors are asked for.
"""

from __future__ import annotations

import functools
import math
import zlib

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.parameter import WeightItem

# The usual width of freshly made weights: activations stay finite through any number of layers.
_STD = 0.02


def dummy_weights(model_config: ModelConfig, dtype: torch.dtype) -> list[WeightItem]:
    """One item for each tensor that a checkpoint of this config would hold; a tensor's values depend on its
    name only.
    """
    return [
        WeightItem(
            name=name,
            file="dummy",
            shape=shape,
            load=functools.partial(_values, name, shape),
            nbytes=math.prod(shape) * dtype.itemsize,
        )
        for name, shape in checkpoint_shapes(model_config).items()
    ]


def checkpoint_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face checkpoint of this config."""
    hidden, inter = model_config.hidden_size, model_config.intermediate_size
    head_dim = model_config.head_dim
    q_size, kv_size = model_config.num_heads * head_dim, model_config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model_config.vocab_size, hidden)}

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(model_config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", q_size, hidden, model_config.attention_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, model_config.attention_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, model_config.attention_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, model_config.attention_bias)
        if model_config.model_type == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.mlp.gate_proj", inter, hidden, model_config.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inter, hidden, model_config.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inter, model_config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not model_config.tie_word_embeddings:
        shapes["lm_head.weight"] = (model_config.vocab_size, hidden)
    return shapes


def _values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    # Seeded by name: every rank of a layout, and every dtype, sees the same model.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * _STD).to(dtype)

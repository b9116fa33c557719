"""Random weights for a model that has a config and no files.

Owns the names and shapes of a checkpoint of each served architecture, and the seed of every tensor. Read by
the loader (`--load-format dummy`). It must not depend on the order in which tensors are asked for, nor on how
they are cut: a rank's part equals that part of the whole.
"""

from __future__ import annotations

import functools
import math
import zlib

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.weights.parameter import WeightItem

# The usual width of freshly made weights: activations stay finite through any number of layers.
_STD = 0.02
# Rows that are drawn from one seed: a part of a large tensor needs no more than the chunks that it touches.
_CHUNK_ROWS = 1024


def dummy_weights(model_config: ModelConfig, dtype: torch.dtype) -> list[WeightItem]:
    """One item for each tensor that a checkpoint of this config would hold; its name seeds its values."""
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


def _values(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dim: int = 0,
    start: int = 0,
    length: int | None = None,
) -> torch.Tensor:
    length = shape[dim] - start if length is None else length
    part = (*shape[:dim], length, *shape[dim + 1 :])
    if name.endswith("norm.weight"):
        return torch.ones(part, dtype=dtype)
    if name.endswith(".bias"):
        return torch.zeros(part, dtype=dtype)
    out = torch.empty(part, dtype=dtype)
    first, last = (start, start + length) if dim == 0 else (0, shape[0])
    for begin in range(first // _CHUNK_ROWS * _CHUNK_ROWS, last, _CHUNK_ROWS):
        rows = _random_rows(name, shape, begin)
        kept = slice(max(first - begin, 0), min(last - begin, len(rows)))
        rows = rows[kept] if dim == 0 else rows.narrow(dim, start, length)
        offset = max(begin - first, 0)
        out[offset : offset + len(rows)].copy_(rows)
    return out


def _random_rows(name: str, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    """The chunk of rows from `begin` on.

    Seeded by name and place, so that every rank of a layout, and every dtype, sees the same model.
    """
    seed = zlib.crc32(f"{name}:{begin}".encode()) if begin else zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(min(_CHUNK_ROWS, shape[0] - begin), *shape[1:], generator=generator) * _STD

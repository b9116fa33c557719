"""Owns small EAGLE and EAGLE3 drafts with random weights on disk, for the models that `tiny_models` writes.

Read by tests that run drafts. A random draft is hardly ever right, which is what they need of it; drafts that
are right are trained. It must not need the target's weights.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Literal

import torch
from safetensors.torch import save_file


def write_random_draft(
    folder: pathlib.Path,
    target: pathlib.Path,
    kind: Literal["eagle", "eagle3"],
    *,
    draft_vocab_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    **config: object,
) -> pathlib.Path:
    """Write a one-layer draft for the model in folder `target`; `config` is merged over its config.

    With `draft_vocab_size` an EAGLE3 draft knows that many of the target's tokens, spread over all of them.
    """
    model = json.loads((target / "config.json").read_text())
    hidden, inner, vocab_size = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    head_dim = 16
    generator = torch.Generator().manual_seed(seed)
    third = kind == "eagle3"
    prefix = "midlayer" if third else "layers.0"
    inputs = 2 * hidden if third else hidden

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden if third else 2 * hidden),
        f"{prefix}.self_attn.q_proj.weight": matrix(num_heads * head_dim, inputs),
        f"{prefix}.self_attn.k_proj.weight": matrix(num_kv_heads * head_dim, inputs),
        f"{prefix}.self_attn.v_proj.weight": matrix(num_kv_heads * head_dim, inputs),
        f"{prefix}.self_attn.o_proj.weight": matrix(hidden, num_heads * head_dim),
        f"{prefix}.post_attention_layernorm.weight": norm(hidden),
        f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
    }
    if third:
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(hidden),
            f"{prefix}.hidden_norm.weight": norm(hidden),
            "norm.weight": norm(hidden),
        }
        if draft_vocab_size is not None:
            known = torch.linspace(0, vocab_size - 1, draft_vocab_size).long()
            tensors |= {
                "lm_head.weight": 4 * matrix(draft_vocab_size, hidden),
                "d2t": known - torch.arange(draft_vocab_size),
                "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, known, True),
            }
    else:
        tensors["fc.bias"] = torch.zeros(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bias": not third,
    }
    if third:
        layers = model["num_hidden_layers"]
        captured = [0, max(layers // 2 - 1, 0), max(layers - 2, 0)]
        written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": captured}
    (folder / "config.json").write_text(json.dumps(written | config))
    save_file(tensors, folder / "model.safetensors")
    return folder

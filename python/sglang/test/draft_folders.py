"""Owns EAGLE and EAGLE3 draft folders whose weights are zeros, for tests that read configs and headers only.

Read by the tests of the draft's config and of resolution. It must not need torch.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save_file

from sglang.srt.configs.draft_config import DRAFT_ARCHITECTURES


def write_draft_folder(
    folder: pathlib.Path,
    kind: str,
    *,
    hidden_size: int = 64,
    vocab_size: int = 300,
    draft_vocab_size: int | None = None,
    captures: int = 3,
    config: Mapping[str, object] = {},
    tensors: Mapping[str, tuple[int, ...] | None] = {},
) -> pathlib.Path:
    """Write config.json and model.safetensors of a one-layer draft in the form that is published.

    `config` is merged over the config, `...` removes a key; `tensors` replaces shapes by name, None removes
    one.
    """
    third = kind == "eagle3"
    written: dict[str, object] = {
        "architectures": [next(name for name, it in DRAFT_ARCHITECTURES.items() if it == kind)],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    shapes = _eagle3_shapes(hidden_size, captures) if third else _eagle_shapes(hidden_size)
    if draft_vocab_size is not None:
        shapes |= {"lm_head.weight": (draft_vocab_size, hidden_size), "d2t": (draft_vocab_size,)}
    merged = {**written, **config}
    kept = {**shapes, **tensors}
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in merged.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    zeros = {
        name: np.zeros(shape, dtype=np.int64 if name == "d2t" else np.float32)
        for name, shape in kept.items()
        if shape is not None
    }
    save_file(zeros, folder / "model.safetensors")
    return folder


def _eagle_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """An EAGLE head: no prefix, no input norm, a fusion of embedding and hidden row."""
    return {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
    }


def _eagle3_shapes(hidden: int, captures: int) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (hidden, captures * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }

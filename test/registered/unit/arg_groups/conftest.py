"""A model folder that has a config and no weights: resolution opens the config and nothing else."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture
def resolved(model_folder: Path) -> Callable[..., Any]:
    """A record of these settings, resolved; `model_path` is the folder unless stated."""
    from sglang.srt.arg_groups.hooks.pipeline import resolve
    from sglang.srt.server_args import ServerArgs

    def build(**settings: Any) -> Any:
        record = ServerArgs.from_kwargs(**{"model_path": model_folder, **settings})
        resolve(record)
        return record

    return build

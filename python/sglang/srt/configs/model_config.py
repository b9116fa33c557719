"""The shape and the habits of one model, from its checkpoint and nothing else.

Owns which architectures are known and every check of a config value. Read by resolution, the models, the
runners and the server (context length, end tokens, sampling defaults). It must not import torch, read weights
or know flags other than the arguments of `from_path`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.architectures.rope_scaling import read_rope
from sglang.srt.configs.gguf.config import config_from_gguf
from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_path import gguf_in_folder, resolve_model_path
from sglang.srt.configs.utf8 import check_utf8
from sglang.srt.environ import envs

# Architecture -> (model_type, head_dim where the config leaves it out; None: hidden_size / heads).
ARCHITECTURES: dict[str, tuple[str, int | None]] = {
    "LlamaForCausalLM": ("llama", None),
    "Qwen3ForCausalLM": ("qwen3", 128),
}
GENERATION_CONFIG = "generation_config.json"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
# What `--sampling-defaults model` takes from generation_config.json.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that other parts need to know about a model before its weights are read.

    `checkpoint_dtype` is torch's name of the stored type, or a GGUF type name such as "Q4_1" for a quantised
    file.
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    context_len: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    bos_token_id: int | None
    end_sources: dict[int, str]  # which ids end a text -> the file that says so
    pad_token_id: int | None
    checkpoint_dtype: str
    source: str  # "gguf" or "hf"
    path: pathlib.Path
    generation_defaults: dict[str, Any]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a text, generation_config.json's first."""
        return tuple(self.end_sources)

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        *,
        context_length: int | None = None,
        override_json: str = "{}",
        load_format: str = "auto",
    ) -> ModelConfig:
        """Read the config of a folder, a GGUF file or an alias; `override_json` is merged over what it
        says.
        """
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format {load_format!r} is not served; known: {', '.join(LOAD_FORMATS)}")
        resolved = _source_of(resolve_model_path(path), load_format)
        generation: dict[str, Any] = {}
        if resolved.is_file():
            config = config_from_gguf(open_gguf(resolved))
            source, where = "gguf", str(resolved)
        else:
            config = _read_json(resolved / "config.json")
            if (resolved / GENERATION_CONFIG).is_file():
                generation = _read_json(resolved / GENERATION_CONFIG)
            source, where = "hf", str(resolved / "config.json")
        config = merge_override(config, override_json)
        values = _checked_values(config, generation, where)
        values["context_len"] = _context_len(values["max_position_embeddings"], context_length, where)
        return cls(**values, source=source, path=resolved)


def merge_override(config: dict[str, Any], override_json: str) -> dict[str, Any]:
    """`config` with the JSON object merged over it; objects inside are merged key by key, null replaces."""
    try:
        override = json.loads(override_json or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"json_model_override_args is not JSON: {error}; got {override_json!r}") from error
    if not isinstance(override, dict):
        raise ValueError(f"json_model_override_args must be a JSON object, got {override_json!r}")
    return _merged(config, override)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _source_of(path: pathlib.Path, load_format: str) -> pathlib.Path:
    """The folder or GGUF file that is really read, given what the user wants to load."""
    if load_format == "gguf" and path.is_dir():
        file = gguf_in_folder(path)
        if file is None:
            raise ValueError(
                f"load_format 'gguf' needs a .gguf file, and {path} holds none; use load_format 'auto'"
            )
        check_utf8(file, "model_path")
        return file
    if load_format == "safetensors" and path.is_file():
        raise ValueError(
            f"load_format 'safetensors' needs a folder, and {path} is a GGUF file; use load_format 'auto'"
        )
    return path


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _checked_values(config: dict[str, Any], generation: dict[str, Any], where: str) -> dict[str, Any]:
    architecture = _architecture(config, where)
    model_type, default_head_dim = ARCHITECTURES[architecture]
    _refuse_what_is_not_served(config, where)
    heads = _positive(config, "num_attention_heads", where)
    kv_heads = _positive(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = _positive(config, "hidden_size", where)
    head_dim = _positive(config, "head_dim", where, default=default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim {head_dim} is odd, and a rotary embedding turns pairs")
    theta, scaling = read_rope(config, where)
    vocab_size = _positive(config, "vocab_size", where)
    return {
        "architecture": architecture,
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _positive(config, "intermediate_size", where),
        "num_layers": _positive(config, "num_hidden_layers", where),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": _positive(config, "max_position_embeddings", where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": _epsilon(config, where),
        "tie_word_embeddings": _boolean(config, "tie_word_embeddings", where),
        "attention_bias": _boolean(config, "attention_bias", where),
        "mlp_bias": _boolean(config, "mlp_bias", where),
        "hidden_act": "silu",
        "bos_token_id": _one_token(generation, config, "bos_token_id", vocab_size, where),
        "end_sources": _token_ids(generation, config, "eos_token_id", vocab_size, where),
        "pad_token_id": _one_token(generation, config, "pad_token_id", vocab_size, where),
        "checkpoint_dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        "generation_defaults": _generation_defaults(generation),
    }


def _architecture(config: dict[str, Any], where: str) -> str:
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    known = ", ".join(sorted(ARCHITECTURES))
    raise ValueError(f"{where}: architecture {names or None} is not served; known: {known}")


def _refuse_what_is_not_served(config: dict[str, Any], where: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{where}: hidden_act {activation!r} is not served; only 'silu' is")
    if config.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config is set, and quantised Hugging Face checkpoints are not served "
            f"yet; use the unquantised checkpoint or a GGUF file"
        )
    if config.get("use_sliding_window"):
        raise ValueError(f"{where}: use_sliding_window is true, and sliding windows are not served yet")


def _context_len(longest: int, asked: int | None, where: str) -> int:
    if asked is None:
        return longest
    if asked <= 0:
        raise ValueError(f"context_length is {asked}; it must be at least 1")
    if asked > longest and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise ValueError(
            f"context_length {asked} is above max_position_embeddings {longest} of {where}; lower it, or set "
            f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if you know that the model bears it"
        )
    return asked


def _positive(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key} is {value!r}; it must be a whole number above 0")
    return value


def _boolean(config: dict[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} is {value!r}; it must be true or false")
    return bool(value)


def _epsilon(config: dict[str, Any], where: str) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"{where}: rms_norm_eps is {value!r}; it must be a number between 0 and 1")
    return float(value)


def _token_ids(
    generation: dict[str, Any], config: dict[str, Any], key: str, vocab_size: int, where: str
) -> dict[int, str]:
    """All ids that either file names under `key`, in order, each once, with the file that named it first."""
    ids: dict[int, str] = {}
    for source, name in ((generation, GENERATION_CONFIG), (config, os.path.basename(where))):
        value = source.get(key)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"{where}: {key} is {value!r}; it must be a token id or a list of them")
            if not 0 <= token < vocab_size:
                raise ValueError(f"{where}: {key} {token} is outside the vocabulary of {vocab_size}")
            ids.setdefault(token, name)
    return ids


def _one_token(
    generation: dict[str, Any], config: dict[str, Any], key: str, vocab_size: int, where: str
) -> int | None:
    # Old configs write -1 for "there is none".
    named, fallback = ({} if source.get(key) == -1 else source for source in (generation, config))
    ids = _token_ids(named, fallback, key, vocab_size, where)
    return next(iter(ids), None)


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {key: generation[key] for key in SAMPLING_DEFAULTS if generation.get(key) is not None}
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1  # Hugging Face switches top-k off with 0; a request does it with -1
    return defaults

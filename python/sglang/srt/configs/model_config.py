"""What a checkpoint says about its model: shape, end tokens, context length, sampling defaults.

Read by resolution, the models, the runners and the server. How the shape is read is the architecture's. It
must not import torch, read weights or know flags other than the arguments of `from_path`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

from sglang.srt.configs.architectures import ARCHITECTURES
from sglang.srt.configs.architectures.config_values import ConfigValues
from sglang.srt.configs.architectures.decoder import Architecture, DecoderShape
from sglang.srt.configs.gguf.config import config_from_gguf
from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.json_file import read_json_object
from sglang.srt.configs.model_path import gguf_in_folder, resolve_model_path
from sglang.srt.configs.stored_int8 import is_stored_int8
from sglang.srt.configs.utf8 import check_utf8
from sglang.srt.environ import envs

GENERATION_CONFIG = "generation_config.json"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
# What `--sampling-defaults model` takes from generation_config.json.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderShape):
    """Everything that other parts need to know about a model before its weights are read.

    `checkpoint_dtype` is torch's name of the stored type, or a GGUF type name such as "Q4_1" for a quantised
    file. `stored_int8`: the checkpoint holds its linear weights in int8, with a scale an output, and is
    computed so; its head, which such checkpoints leave out, is not.
    """

    architecture: str
    model_type: str
    context_len: int
    bos_token_id: int | None
    end_sources: dict[int, str]  # which ids end a text -> the file that says so
    pad_token_id: int | None
    checkpoint_dtype: str
    stored_int8: bool
    source: str  # "gguf" or "hf"
    path: pathlib.Path
    generation_defaults: dict[str, object]

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
        """Read the config of a folder, a GGUF file or an alias.

        `override_json` is merged over what it says.
        """
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format {load_format!r} is not served; known: {', '.join(LOAD_FORMATS)}")
        resolved = _source_of(resolve_model_path(path), load_format)
        generation: dict[str, object] = {}
        if resolved.is_file():
            config = config_from_gguf(open_gguf(resolved))
            source, where = "gguf", str(resolved)
        else:
            config = read_json_object(resolved / "config.json")
            if (resolved / GENERATION_CONFIG).is_file():
                generation = read_json_object(resolved / GENERATION_CONFIG)
            source, where = "hf", str(resolved / "config.json")
        config = merge_override(config, override_json)
        architecture = _architecture(config, where)
        stored_int8 = is_stored_int8(config, where)
        shape = architecture.read(ConfigValues(config, where))
        tokens = _TokenReader(generation, config, shape.vocab_size, where)
        return cls(
            **vars(shape),
            architecture=architecture.name,
            model_type=architecture.model_type,
            bos_token_id=tokens.one("bos_token_id"),
            end_sources=tokens.all("eos_token_id"),
            pad_token_id=tokens.one("pad_token_id"),
            context_len=_context_len(shape.max_position_embeddings, context_length, where),
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            stored_int8=stored_int8,
            source=source,
            path=resolved,
            generation_defaults=_generation_defaults(generation),
        )


def merge_override(config: dict[str, object], override_json: str) -> dict[str, object]:
    """`config` with the JSON object merged over it; objects inside are merged key by key, null replaces."""
    try:
        override = json.loads(override_json or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"json_model_override_args is not JSON: {error}; got {override_json!r}") from error
    if not isinstance(override, dict):
        raise ValueError(f"json_model_override_args must be a JSON object, got {override_json!r}")
    return _merged(config, override)


def _merged(base: dict[str, object], over: dict[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _source_of(path: pathlib.Path, load_format: str) -> pathlib.Path:
    """The folder or file to read: with load format "gguf" the GGUF file inside a folder."""
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


def _architecture(config: dict[str, object], where: str) -> Architecture:
    """The first known one of those that the config names."""
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    raise ValueError(f"{where}: architecture {names or None} is not served; known: {known}")


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


@dataclasses.dataclass(frozen=True)
class _TokenReader:
    """Special tokens, which generation_config.json and the config may both name."""

    generation: Mapping[str, object]
    config: Mapping[str, object]
    vocab_size: int
    where: str

    def all(self, key: str, *, none: int | None = None) -> dict[int, str]:
        """All ids that either file names, in order, each once, with the file that named it first."""
        ids: dict[int, str] = {}
        for source, name in (
            (self.generation, GENERATION_CONFIG),
            (self.config, os.path.basename(self.where)),
        ):
            value = source.get(key)
            for token in value if isinstance(value, list) else [] if value in (None, none) else [value]:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise ValueError(
                        f"{self.where}: {key} is {value!r}; it must be a token id or a list of them"
                    )
                if not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{self.where}: {key} {token} is outside the vocabulary of {self.vocab_size}"
                    )
                ids.setdefault(token, name)
        return ids

    def one(self, key: str) -> int | None:
        """The first id, None where there is none; old configs write -1 for that."""
        return next(iter(self.all(key, none=-1)), None)


def _generation_defaults(generation: Mapping[str, object]) -> dict[str, object]:
    defaults = {key: generation[key] for key in SAMPLING_DEFAULTS if generation.get(key) is not None}
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1  # Hugging Face switches top-k off with 0; a request does it with -1
    return defaults

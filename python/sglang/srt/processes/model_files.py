"""Owns how a process opens the files that the published settings name: the model's config and tokenizer.

Used by the rank's entry and by the doors, so that both read the same files in the same way. It must not load
weights.
"""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer


def published_model_config() -> ModelConfig:
    """The config of the published model, with the operator's context length and overrides."""
    model = get_model()
    return ModelConfig.from_path(
        model.model_path,
        context_length=model.context_length,
        override_json=model.json_model_override_args,
        load_format=model.load_format,
    )


def published_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """The tokenizer that goes with it; None with `--skip-tokenizer-init`."""
    serving = get_serving()
    if serving.skip_tokenizer_init:
        return None
    given = serving.tokenizer_path
    path = resolve_model_path(given, "tokenizer_path") if given else model_config.path
    return load_tokenizer(
        path,
        mode=serving.tokenizer_mode,
        chat_template=serving.chat_template,
        template_variables=serving.default_chat_template_kwargs,
    )

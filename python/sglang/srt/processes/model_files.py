"""Owns how a process opens the files that the published settings name: the model's config and tokenizer.

Used by the rank's entry and by the doors, so that both read the same files in the same way; the doors also
compare the tokens of a draft with the model's, before anything is published. It must not load weights.
"""

from __future__ import annotations

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.arg_groups.speculative_algorithms import facts_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.tokenizer.draft_vocabulary import check_same_tokens
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


def refuse_other_tokens(record: object) -> None:
    """ValueError where the resolved record names a whole model as draft and its tokens are not the model's.

    Without a tokenizer there is nothing to compare; resolution has then compared the sizes.
    """
    view = resolved_view(record)
    algorithm, draft = view.speculative_algorithm, view.speculative_draft_model_path
    if algorithm is None or draft is None or facts_of(algorithm).draft != "standalone":
        return
    if view.skip_tokenizer_init or view.tokenizer_path is None:
        return
    path = resolve_model_path(draft, "--speculative-draft-model-path")
    theirs = resolve_model_path(view.tokenizer_path, "tokenizer_path")
    if path == theirs:
        return  # the model drafts for itself
    config = ModelConfig.from_path(path, load_format=view.speculative_draft_load_format or "auto")
    check_same_tokens(load_tokenizer(theirs), load_tokenizer(config.path), head_rows=config.vocab_size)

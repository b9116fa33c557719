"""Owns at which tokens the answers of a model end, in a chat and elsewhere, and what the log reports of it.

Used by the chat route and by whoever starts an engine. It must not render or tokenize a request.
"""

from __future__ import annotations

import logging

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.tokenizer.tokenizer import Tokenizer
from sglang.srt.tokenizer.tokenizer_like import TokenizerLike

logger = logging.getLogger(__name__)


def chat_end_ids(tokenizer: TokenizerLike, model_config: ModelConfig) -> list[int]:
    """The ids that end an answer in a chat and not a plain completion; only such as the model can draw."""
    return [
        token
        for token in tokenizer.chat_end_ids
        if token < model_config.vocab_size and token not in model_config.end_sources
    ]


def end_ids(tokenizer: Tokenizer, model_config: ModelConfig) -> dict[int, list[str]]:
    """The ids that end any answer -> the files and settings that name them."""
    sources: dict[int, list[str]] = {}
    for named in (model_config.end_sources, tokenizer.end_sources):
        for token, source in named.items():
            sources.setdefault(token, []).append(source)
    return sources


def report_chat(tokenizer: Tokenizer, model_config: ModelConfig) -> None:
    """Log one line about the template and one about end tokens; a warning where no chat can be served."""
    templates = tokenizer.templates
    if templates.default is None:
        logger.warning("No chats: %s", templates.why_none())
    else:
        forms = templates.forms(templates.default)
        level = logging.WARNING if forms.drops("user") else logging.INFO
        logger.log(level, "Chat template %r: %s", templates.default_name, forms.summary())
    logger.info("%s", describe_ends(tokenizer, model_config))


def describe_ends(tokenizer: Tokenizer, model_config: ModelConfig) -> str:
    """At which tokens an answer ends, each with what names it."""
    ends = [
        _shown(tokenizer, token, "; ".join(named))
        for token, named in end_ids(tokenizer, model_config).items()
    ]
    chat = [
        _shown(tokenizer, token, "written by the chat template")
        for token in chat_end_ids(tokenizer, model_config)
    ]
    words = f"Answers end at {', '.join(ends) or 'no token, since the files of the model name none'}"
    return f"{words}; in a chat also at {', '.join(chat)}" if chat else words


def _shown(tokenizer: Tokenizer, token: int, source: str) -> str:
    return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r} ({source})"

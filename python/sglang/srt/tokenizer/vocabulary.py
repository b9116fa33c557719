"""What a checkpoint says about its tokenizer, whatever file said it.

Owns the hand-over between the readers (Hugging Face folder, GGUF metadata) and the facade, and nothing else.
Read by the facade. It must not encode or render anything.
"""

from __future__ import annotations

import dataclasses
import pathlib

import tokenizers

DEFAULT_TEMPLATE = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A ready `tokenizers` object with the words around it.

    `special_tokens` maps a role ("bos_token", "eos_token", "pad_token", "unk_token") to the token's text;
    `end_token_ids` are further ids that end an answer, each with the words that name it; `chat_templates`
    are by name, and one that has none is called "default".
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    source: pathlib.Path
    end_token_ids: dict[int, str] = dataclasses.field(default_factory=dict)

"""Owns what the request side asks of a tokenizer: `Tokenizer` offers it, and so does a test's.

Read by the OpenAI routes and the incremental detokenizer. It must not do anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang.srt.tokenizer.model_templates import ModelTemplates


class TokenizerLike(Protocol):
    """Text to ids and back; `Tokenizer` says what each member means."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def chat_end_ids(self) -> Sequence[int]: ...

    @property
    def templates(self) -> ModelTemplates: ...

    @property
    def utf8_errors(self) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, prompt: str) -> list[int]: ...

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def first_bytes(self, token_id: int, /) -> bytes: ...

    def context_of(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]: ...

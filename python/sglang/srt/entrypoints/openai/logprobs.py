"""Owns the log-probabilities of an answer in OpenAI's two forms, and how a token is written there.

Read by the chat and completions routes. Native entries are `[logprob, token_id, text or null]`. It must not
recompute a probability: the chosen token's float is the same object wherever it appears, because clients
compare by equality.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from sglang.srt.messages.generate_output import MetaInfo
from sglang.srt.messages.requests import LOGPROB_FLOOR
from sglang.srt.tokenizer.tokenizer_like import TokenizerLike


class TokenLogprobs(msgspec.Struct, kw_only=True):
    """One token of a choice: its id, its log-probability and the alternatives, best first."""

    token_id: int
    logprob: float | None
    top: list[tuple[float, int]] = []


def finite(value: float | None) -> float | None:
    """JSON has no minus infinity: a token that cannot be drawn reads `LOGPROB_FLOOR`."""
    if value is None or math.isfinite(value):
        return value
    return LOGPROB_FLOOR


def read_native(meta: MetaInfo, part: Literal["input", "output"]) -> list[TokenLogprobs]:
    """The entries of the prompt's tokens ("input") or of the answer's."""
    if part == "input":
        chosen, tops = meta.get("input_token_logprobs", []), meta.get("input_top_logprobs", [])
    else:
        chosen, tops = meta.get("output_token_logprobs", []), meta.get("output_top_logprobs", [])
    tokens = []
    for position, (logprob, token_id, *_) in enumerate(chosen):
        top = (tops[position] if position < len(tops) else None) or ()
        tokens.append(
            TokenLogprobs(
                token_id=token_id,
                logprob=finite(logprob),
                top=[(_floored(value), other) for value, other, *_ in top],
            )
        )
    return tokens


def _floored(value: float | None) -> float:
    number = finite(value)
    return LOGPROB_FLOOR if number is None else number


def token_text(raw: bytes) -> str:
    """A token's text; a part of a character is spelled by its bytes, so that no two read alike."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_content(tokens: Sequence[TokenLogprobs], tokenizer: TokenizerLike) -> list[dict[str, object]]:
    """Chat's form: `[{token, bytes, logprob, top_logprobs: [{token, bytes, logprob}]}]`."""
    return [
        {
            **_chat_entry(token.token_id, token.logprob, tokenizer),
            "top_logprobs": [
                _chat_entry(other, token.logprob if other == token.token_id else value, tokenizer)
                for value, other in token.top
            ],
        }
        for token in tokens
    ]


def _chat_entry(token_id: int, logprob: float | None, tokenizer: TokenizerLike) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(raw), "bytes": list(raw), "logprob": logprob}


def completion_lists(
    tokens: Sequence[TokenLogprobs], offsets: Sequence[int], tokenizer: TokenizerLike
) -> dict[str, list[object]]:
    """Completions' form: parallel lists. The first prompt token has no log-probability."""
    return {
        "tokens": [token_text(tokenizer.token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else alternatives_map(token, tokenizer) for token in tokens
        ],
        "text_offset": list(offsets),
    }


def alternatives_map(token: TokenLogprobs, tokenizer: TokenizerLike) -> dict[str, float]:
    """Text -> log-probability, of the alternatives and of the chosen token.

    Two ids may read alike. Nothing is overwritten: the chosen one, then the more likely one, keeps the text,
    the other is listed as `token_id:N`.
    """
    assert token.logprob is not None
    found = {token_text(tokenizer.token_bytes(token.token_id)): token.logprob}
    for value, other in sorted(token.top, key=lambda pair: -pair[0]):
        if other == token.token_id:
            continue
        text = token_text(tokenizer.token_bytes(other))
        found[text if text not in found else f"token_id:{other}"] = value
    # Best first, as the engine lists them (a dict keeps its order in JSON).
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class TextOffsets:
    """Where each token of one choice begins in its text, in characters, counted as the tokens come.

    A token that begins inside a character has the offset of that character. Tokens that do not show in the
    text (skipped special tokens) have no width. Stop text that was cut from the answer is counted: offsets in
    a stream and in a whole answer are the same.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        start: int = 0,
        text: str | None = None,
        before: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """`before` are the ids in front of the counted ones.

        `text` is the prompt's text where its own tokens are counted: it says which special tokens show.
        """
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.utf8_errors)
        self._begins_text = not tokenizer.context_of(before, skip_special_tokens)
        self._skips_special = skip_special_tokens
        self._text = text
        self._start = start
        self._length = 0

    def next(self, token_id: int) -> int:
        """The offset of this token; the next one begins behind it."""
        offset = self._start + self._length
        tokenizer = self._tokenizer
        raw = (tokenizer.first_bytes if self._begins_text else tokenizer.token_bytes)(token_id)
        if token_id in self._special and self._is_hidden(raw):
            return offset
        if self._begins_text and self._text is not None and raw[:1] == b" " and self._text[:1] != " ":
            # Some tokenizers put a space before the first word that neither the text nor a decode has.
            raw = raw[1:]
        self._begins_text = False
        if not raw:
            return offset
        # The first byte by itself: what it ends (a broken character) lies before the token.
        self._length += self._width(raw[:1])
        begun_character = bool(self._decoder.getstate()[0])
        offset = self._start + self._length - (0 if begun_character else 1)
        self._length += self._width(raw[1:])
        # A text whose spaces the tokenizer does not keep is shorter than its tokens.
        return offset if self._text is None else min(offset, self._start + len(self._text))

    def _width(self, raw: bytes) -> int:
        """Characters that these bytes complete."""
        text = self._decoder.decode(raw)
        begun = self._decoder.getstate()[0]
        if len(begun) == 2 and begun[0] == 0xED and begun[1] >= 0xA0:
            # The codec waits for the rest of a surrogate, which is no character whatever comes.
            text += self._decoder.decode(b"", True)
        return len(text)

    def _is_hidden(self, raw: bytes) -> bool:
        if self._text is None:
            return self._skips_special
        return not self._text.startswith(raw.decode("utf-8", "replace"), self._length)

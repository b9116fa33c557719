"""How ids become text: whole, token by token, and behind text that is already there.

Owns what the `tokenizers` library does not offer: which bytes a token adds, that the first token of a text
reads differently, and how broken bytes read. Read by the tokenizer facade. It must not encode.
"""

from __future__ import annotations

import codecs
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tokenizers

from sglang.srt.tokenizer.byte_level import piece_to_bytes

T = TypeVar("T")

REPLACEMENT = "\ufffd"
#: How bytes that are no character read after byte fallback: one mark each, as SentencePiece itself writes
#: them. Elsewhere it is "replace": one mark for as much as could have been one character.
MARK_EACH_BYTE = "sglang-mark-each-byte"
#: How many of the last prompt tokens are decoded first for the text before an answer.
_CONTEXT = 8
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(MARK_EACH_BYTE, _mark_each_byte)


class IdReader:
    """Ids to text. A token is read as it stands in the middle of a text unless it is said to begin one.

    The constructor refuses (`ValueError`) a tokenizer of which no text can be made piece by piece.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: pathlib.Path) -> None:
        self._backend = backend
        self._source = source
        added = backend.get_added_tokens_decoder()
        # Added tokens are spelled as plain text, everything else in the alphabet of the vocabulary.
        self._added = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = not self._byte_level and "ByteFallback" in kinds
        #: Bytes in, text out: nothing depends on what stands before.
        self._reads_alone = kinds == ["ByteLevel"]
        self.utf8_errors = MARK_EACH_BYTE if self._byte_fallback else "replace"
        self._bytes: dict[int, bytes] = {}
        self._refuse_unreadable(kinds)
        self._anchor = None if self._byte_level else self._find_anchor()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`, as a text of its own."""
        try:
            text: str = library_call(
                lambda: self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            )
        except OverflowError as error:
            raise ValueError("a token id is a whole number from 0 to 4294967295") from error
        if self._byte_fallback and REPLACEMENT in text:
            # The library gives up a whole run of byte tokens for one broken byte in it.
            pieces = _separated(self._shown_pieces(ids, skip_special_tokens))
            text = library_call(lambda: self._backend.decoder.decode(pieces))
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds in the middle of a text; nothing for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(token_id)
        return known

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text: many tokenizers leave out its space there."""
        raw = self.token_bytes(token_id)
        if self._reads_alone or not _is_text(raw):
            return raw
        return self.decode([token_id], False).encode()

    def context_of(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        """The last of `ids` that further ids must be decoded with, to read as they do behind all of `ids`.

        In other words, text(ids + more) - text(ids) is text(context + more) - text(context). Empty where
        nothing before matters. A character that `ids` begin and do not end is left out: what follows cannot
        take it back.
        """
        if self._reads_alone:
            return []
        hidden = self._special if skip_special_tokens else frozenset()
        size = _CONTEXT
        while True:
            context = self._whole_characters([token_id for token_id in ids[-size:] if token_id not in hidden])
            if size >= len(ids) or self.decode(context, skip_special_tokens):
                return context
            size *= _CONTEXT

    def _whole_characters(self, ids: list[int]) -> list[int]:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        border = 0
        for place, token_id in enumerate(ids, 1):
            utf8.decode(self.token_bytes(token_id))
            if not utf8.getstate()[0]:
                border = place
        return ids[:border]

    def _piece(self, token_id: int) -> str | None:
        piece: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return self._added.get(token_id, piece)

    def _byte_of(self, token_id: int) -> bytes | None:
        """The byte that a token of byte fallback stands for."""
        match = _BYTE_PIECE.fullmatch(self._piece(token_id) or "") if self._byte_fallback else None
        return bytes([int(match[1], 16)]) if match else None

    def _spelled(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            raw = None if token_id in self._added else piece_to_bytes(piece)
            return piece.encode() if raw is None else raw
        byte = self._byte_of(token_id)
        return self._text_in_the_middle(token_id).encode() if byte is None else byte

    def _text_in_the_middle(self, token_id: int) -> str:
        if self._anchor is not None:
            before = self.decode([self._anchor], False)
            text = self.decode([self._anchor, token_id], False)
            if text.startswith(before):
                return text[len(before) :]
        return self.decode([token_id], False)

    def _find_anchor(self) -> int | None:
        """A token that shows text by itself, to stand before others."""
        for token_id in sorted(self._backend.get_vocab(with_added_tokens=False).values()):
            if token_id not in self._added and self._byte_of(token_id) is None:
                text = self.decode([token_id], False)
                if text and REPLACEMENT not in text:
                    return token_id
        return None

    def _shown_pieces(self, ids: Sequence[int], skip_special_tokens: bool) -> Iterator[str]:
        for token_id in ids:
            piece = self._piece(token_id)
            if piece is not None and not (skip_special_tokens and token_id in self._special):
                yield piece

    def _refuse_unreadable(self, kinds: list[str]) -> None:
        ids = sorted(self._backend.get_vocab(with_added_tokens=True).values())
        cure = "name a tokenizer of a text model with --tokenizer-path"
        if not ids:
            raise ValueError(f"{self._source}: the vocabulary of the tokenizer is empty; {cure}")
        if "CTC" in kinds:
            raise ValueError(
                f"{self._source}: the decoder of the tokenizer is of kind CTC, which reads frames of speech "
                f"and leaves out repeated tokens, so an answer cannot be written with it; {cure}"
            )
        try:
            library_call(lambda: self._backend.decode(ids, skip_special_tokens=False))
        except Exception as error:  # the library raises whatever it likes
            raise ValueError(
                f"{self._source}: the decoder of the tokenizer cannot make text of its tokens ({error}); "
                f"mend the decoder in tokenizer.json, or {cure}"
            ) from error


def library_call(call: Callable[[], T]) -> T:
    """Ask the `tokenizers` library; a panic inside it is no `Exception`, and becomes a RuntimeError here."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizers library failed: {error}") from error


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The kinds of the decoder's steps, in order; none where it joins tokens by spaces."""
    decoder = backend.decoder  # the library describes it only as JSON
    return [] if decoder is None else _step_kinds(json.loads(decoder.__getstate__()))


def _step_kinds(step: dict[str, Any]) -> list[str]:
    if step["type"] != "Sequence":
        return [step["type"]]
    return [kind for inner in step["decoders"] for kind in _step_kinds(inner)]


def _separated(pieces: Iterator[str]) -> list[str]:
    """The same pieces with an empty one between the characters of a run of byte tokens.

    A broken byte then spoils no whole character beside it.
    """
    result: list[str] = []
    run: list[str] = []
    for piece in pieces:
        if _BYTE_PIECE.fullmatch(piece):
            run.append(piece)
            continue
        result += [*_cut_run(run), piece]
        run = []
    return [*result, *_cut_run(run)]


def _cut_run(run: list[str]) -> Iterator[str]:
    raw = bytes(int(piece[3:5], 16) for piece in run)
    at = 0
    while at < len(raw):
        width = next((width for width in range(1, 5) if _is_text(raw[at : at + width])), 1)
        if at:
            yield ""
        yield from run[at : at + width]
        at += width


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True

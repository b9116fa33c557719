"""One tokenizer for the rest of the engine, whatever file it came from.

Owns `load_tokenizer` and the facade: ids, text, exact bytes of a token, chat prompts. Read by the server
process, the detokenizer and the scheduler. It must not import torch or transformers.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from sglang.srt.configs.gguf_parts import open_gguf
from sglang.srt.configs.model_path import gguf_in_folder
from sglang.srt.tokenizer.byte_level import piece_to_bytes
from sglang.srt.tokenizer.chat_template import read_chat_template
from sglang.srt.tokenizer.gguf_tokenizer import read_gguf_vocabulary
from sglang.srt.tokenizer.hf_tokenizer import read_hf_vocabulary
from sglang.srt.tokenizer.model_templates import ModelTemplates
from sglang.srt.tokenizer.turn_ends import turn_ends_in
from sglang.srt.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

#: Characters above which a text takes milliseconds and other threads must run beside it.
LONG_TEXT = 4000
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def load_tokenizer(
    path: pathlib.Path,
    *,
    mode: str = "auto",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file; `chat_template` replaces the model's own
    template.

    `chat_template` is the name of one that the model brings, a jinja file, a JSON file with the key
    chat_template, or the template itself. `template_variables` are given to it in every chat.
    """
    if mode != "auto":
        raise ValueError(f"tokenizer_mode {mode!r} is not served; only 'auto' is (the fast tokenizer)")
    vocabulary = _read_vocabulary(pathlib.Path(path))
    if chat_template is not None:
        chosen = read_chat_template(chat_template, vocabulary.chat_templates)
        vocabulary.chat_templates.clear()
        vocabulary.chat_templates[DEFAULT_TEMPLATE] = chosen
    return Tokenizer(vocabulary, template_variables or {})


class Tokenizer:
    """Text to ids and back.

    Special tokens that stand in a text are recognised as such (a user who writes `<|im_end|>` writes that
    token); decoding never tidies spaces, so the text of a stream is the text of its tokens.
    """

    def __init__(self, vocabulary: Vocabulary, template_variables: Mapping[str, Any]) -> None:
        self._backend = vocabulary.backend
        self._source = vocabulary.source
        self._special_tokens = vocabulary.special_tokens
        self.templates = ModelTemplates(
            vocabulary.chat_templates, {**vocabulary.special_tokens, **template_variables}
        )
        added = self._backend.get_added_tokens_decoder()
        # Added tokens are spelled as plain text, everything else in the alphabet of the vocabulary.
        self._added = {index: token.content for index, token in added.items()}
        self.all_special_ids: list[int] = [index for index, token in added.items() if token.special]
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        #: Every id this tokenizer knows is below; with gaps in the numbering it is more than `vocab_size`.
        self.num_ids: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token: str | None = self._special_tokens.get("bos_token")
        self.eos_token: str | None = self._special_tokens.get("eos_token")
        self.pad_token: str | None = self._special_tokens.get("pad_token")
        self.bos_token_id: int | None = self._role_id("bos_token")
        #: Which ids end a text -> what named them.
        self.end_sources: dict[int, str] = dict(vocabulary.end_token_ids)
        eos = self._role_id("eos_token")
        if eos is not None:
            self.end_sources = {eos: "the tokenizer's eos_token", **self.end_sources}
        self.eos_token_ids: tuple[int, ...] = tuple(self.end_sources)
        self._byte_level = _decodes_bytes(self._backend, "ByteLevel")
        self._byte_fallback = _decodes_bytes(self._backend, "ByteFallback")
        self._bytes: dict[int, bytes] = {}
        self.adds_bos = self.bos_token_id is not None and self.encode("a")[:1] == [self.bos_token_id]

    @property
    def chat_template(self) -> str | None:
        """The template that a chat without tools is rendered by, None where none is meant."""
        return self.templates.default

    @functools.cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer in a chat and not a plain completion: turn ends that the template writes,
        as far as the vocabulary has them as tokens of their own.
        """
        ends = turn_ends_in(self.templates.written())
        ids = [index for index, text in self._added.items() if text in ends]
        return tuple(index for index in sorted(ids) if index not in self.end_sources)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` also the BOS or EOS that this tokenizer puts around a
        text.
        """
        try:
            if len(text) > LONG_TEXT:
                # Only the batch calls release the interpreter: a server has other clients meanwhile.
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except TypeError as error:
            # JSON can smuggle half of a surrogate pair into a string, and no encoding has bytes for that.
            raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair") from error
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        """Ids of a rendered chat prompt: with exactly one BOS where the tokenizer adds one, without where it
        does not.
        """
        ids = self.encode(prompt, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`. Bytes that end inside a character come out as U+FFFD.

        `spaces_between_special_tokens` is a rule of slow tokenizers; a fast one, like this, never adds such
        spaces.
        """
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise ValueError("a token id is a whole number from 0 to 4294967295") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text; nothing for an id that the vocabulary does not
        have.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(token_id)
        return known

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; `kwargs` become template variables. Encode it with `encode_chat`."""
        return self.templates.render(
            messages,
            template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
        )

    def _role_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _spelled(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if piece is None:
            return b""
        if self._byte_level:
            raw = piece_to_bytes(piece)
            return piece.encode() if raw is None else raw
        if self._byte_fallback:
            match = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(match.group(1), 16)]) if match else piece.replace(_SPACE, " ").encode()
        raise ValueError(
            f"the tokenizer at {self._source} is neither byte-level nor with byte fallback, so the exact "
            f"bytes of a token are not known"
        )


def _read_vocabulary(path: pathlib.Path) -> Vocabulary:
    if path.is_file():
        return read_gguf_vocabulary(open_gguf(path))
    if not path.is_dir():
        raise ValueError(f"tokenizer path {path} does not exist; give a folder or a .gguf file")
    if not (path / "tokenizer.json").is_file():
        file = gguf_in_folder(path)
        if file is not None:
            return read_gguf_vocabulary(open_gguf(file))
    return read_hf_vocabulary(path)


def _decodes_bytes(backend: tokenizers.Tokenizer, kind: str) -> bool:
    """Whether the decoder (alone or in a sequence) is of a kind; the library tells it only as JSON."""
    decoder = backend.decoder
    return decoder is not None and f'"type":"{kind}"' in decoder.__getstate__().decode()

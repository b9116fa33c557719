"""One tokenizer for the rest of the engine, whatever file it came from.

Owns `load_tokenizer` and the facade: ids, text, exact bytes of a token, chat prompts. Read by the server
process, the detokenizer and the scheduler. It must not import torch or transformers.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence

from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_path import gguf_in_folder
from sglang.srt.tokenizer.chat_template import read_chat_template
from sglang.srt.tokenizer.gguf_tokenizer import read_gguf_vocabulary
from sglang.srt.tokenizer.hf_tokenizer import read_hf_vocabulary
from sglang.srt.tokenizer.id_reader import IdReader, library_call
from sglang.srt.tokenizer.model_templates import ModelTemplates
from sglang.srt.tokenizer.turn_ends import turn_ends_in
from sglang.srt.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

#: Characters above which tokenizing takes milliseconds, and must let other threads run.
LONG_TEXT = 4000


def load_tokenizer(
    path: pathlib.Path,
    *,
    mode: str = "auto",
    chat_template: str | None = None,
    template_variables: Mapping[str, object] | None = None,
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    `chat_template` replaces the model's own template: the name of one that the model brings, a jinja file, a
    JSON file with the key chat_template, or the template itself. `template_variables` are given to it in
    every chat.
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

    def __init__(self, vocabulary: Vocabulary, template_variables: Mapping[str, object]) -> None:
        self._backend = vocabulary.backend
        self.source: pathlib.Path = vocabulary.source
        self._special_tokens = vocabulary.special_tokens
        self.templates = ModelTemplates(
            vocabulary.chat_templates, {**vocabulary.special_tokens, **template_variables}
        )
        self._reader = IdReader(vocabulary.backend, vocabulary.source)
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = {token.content: index for index, token in added.items() if token.special}
        self.all_special_ids: list[int] = list(self._special_ids.values())
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        #: Every id this tokenizer knows is below; with gaps in the numbering it is more than `vocab_size`.
        self.num_ids: int = 1 + max(self.ids_of_tokens().values(), default=-1)
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
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        #: How the bytes of tokens become text (the `errors` of a UTF-8 decoder), as `decode` does it.
        self.utf8_errors: str = self._reader.utf8_errors
        self.token_bytes = self._reader.token_bytes
        self.first_bytes = self._reader.first_bytes
        self.context_of = self._reader.context_of

    @property
    def chat_template(self) -> str | None:
        """The template that a chat without tools is rendered by, None where none is meant."""
        return self.templates.default

    @functools.cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer in a chat and not a plain completion.

        They are the turn ends that the template writes and that are tokens of their own.
        """
        ends = turn_ends_in(self.templates.written())
        added = self._backend.get_added_tokens_decoder()
        ids = [index for index, token in added.items() if token.content in ends]
        return tuple(index for index in sorted(ids) if index not in self.end_sources)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` those of a BOS or EOS around it too."""

        def call() -> list[int]:
            if len(text) > LONG_TEXT:
                # Only the batch calls release the interpreter: a server has other clients meanwhile.
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids

        try:
            return library_call(call)
        except TypeError as error:
            # JSON can smuggle half of a surrogate pair into a string, and no encoding has bytes for that.
            raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair") from error
        except Exception as error:  # a word that the vocabulary lacks, where it has no token for unknown ones
            raise ValueError(f"the text cannot be written in the tokens of this model: {error}") from error

    def encode_chat(self, prompt: str) -> list[int]:
        """Ids of a rendered chat prompt, with exactly one BOS if the tokenizer adds one to a text."""
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
        return self._reader.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token, special or not, as it reads in the middle of a text; half a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", self.utf8_errors)

    def ids_of_tokens(self) -> dict[str, int]:
        """Every token as the tokenizer's file writes it -> its id, added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written exactly so."""
        return self._special_ids.get(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: object,
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

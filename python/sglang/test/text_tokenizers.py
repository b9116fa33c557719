"""Owns small tokenizers of every kind that decodes in its own way, as real `tokenizer.json` files.

Read by tests about text made of ids. Byte-level ones are in `tiny_models`. It must not depend on a model.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from sglang.test.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, save_tokenizer, write_tiny_tokenizer

UNKNOWN = "<unk>"
SPACE = "\u2581"  # what SentencePiece writes for a space
#: Each of them is one token.
WORDS = ("Hello", "world", "again", "!", "A", "the", "end")
_LETTERS = "abcdefghijklmnopqrstuvwxyzHA!,.'"


def write_text_tokenizer(
    folder: pathlib.Path, kind: str, *, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> pathlib.Path:
    """The tokenizer files of one of `KINDS` with the special tokens of the tiny models at their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "byte-level":
        write_tiny_tokenizer(folder, vocab_size=400, add_bos=adds_bos, chat_template=chat_template)
        return folder
    save_tokenizer(folder, KINDS[kind](), add_bos=adds_bos, chat_template=chat_template, unk_token=UNKNOWN)
    return folder


def sentencepiece_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges as in Llama 2: specials, `<0x00>` to `<0xFF>`, then pieces with marked spaces."""
    tokens = [*SPECIAL_TOKENS, UNKNOWN, *(f"<0x{value:02X}>" for value in range(256)), SPACE, *_LETTERS]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for piece in (SPACE + word, word):
            for cut in range(1, len(piece)):
                pair = piece[:cut], piece[cut]
                if pair not in merges:
                    merges.append(pair)
                tokens += [pair[1], pair[0] + pair[1]]
    return [*dict.fromkeys([*tokens, SPACE * 2])], [*merges, (SPACE, SPACE)]


def _byte_fallback() -> tokenizers.Tokenizer:
    tokens, merges = sentencepiece_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _unigram() -> tokenizers.Tokenizer:
    pieces = [SPACE, *_LETTERS, *WORDS, *(SPACE + word for word in WORDS)]
    scored = [(token, 0.0) for token in (*SPECIAL_TOKENS, UNKNOWN)]
    scored += [(piece, -20.0 + 2 * len(piece)) for piece in dict.fromkeys(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _word_level() -> tokenizers.Tokenizer:
    words = [*SPECIAL_TOKENS, UNKNOWN, *WORDS, *(f"w{number}" for number in range(40))]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    letters = itertools.chain(_LETTERS, (f"##{letter}" for letter in _LETTERS))
    words = dict.fromkeys([*SPECIAL_TOKENS, UNKNOWN, *WORDS, "##ing", "n't", "'s", *letters])
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


#: Kinds without a byte alphabet, and how each is built; "byte-level" is the other one.
KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-fallback": _byte_fallback,
    "unigram": _unigram,
    "word-level": _word_level,
    "word-piece": _word_piece,
}

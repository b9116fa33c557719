"""The tokenizer inside a GGUF file's metadata.

Owns the build of a `tokenizers` object from tokens, merges or scores, and token types. Read by
`load_tokenizer`. It must not read tensors, and it refuses vocabularies it cannot reproduce exactly.
"""

from __future__ import annotations

import logging
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from sglang.srt.configs.gguf.header import GGUFHeader
from sglang.srt.tokenizer.gguf_pretokenizer import (
    PRE_TOKENIZATIONS,
    PreTokenization,
    build_normalizer,
    build_pre_tokenizer,
)
from sglang.srt.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # what SentencePiece writes for a space
_ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def read_gguf_vocabulary(header: GGUFHeader) -> Vocabulary:
    """Build the tokenizer that the file describes."""
    model = header.require(_PREFIX + "model", str)
    tokens = header.require_list(_PREFIX + "tokens", str)
    types = _token_types(header, len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(
            f"{header.path}: {len(tokens) - len(vocab)} of the {len(tokens)} tokens are there twice"
        )
    roles = {
        role: token for role, key in _ROLE_KEYS.items() if (token := _token(header, key, tokens)) is not None
    }
    if model == "gpt2":
        backend, adds_bos = _byte_level(header, vocab)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(header, tokens, types, vocab, roles.get("unk_token")), True
    else:
        raise ValueError(f"{header.path}: tokenizer model {model!r} is not served; known: gpt2, llama")
    _add_tokens(backend, tokens, types, roles)
    _add_ends(backend, header, adds_bos, vocab, roles)
    return Vocabulary(
        backend=backend,
        special_tokens=roles,
        chat_templates=_chat_templates(header),
        source=header.path,
        end_token_ids=_end_token_ids(header, tokens),
    )


def _byte_level(header: GGUFHeader, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    style = _pre_tokenization(header)
    merges = [tuple(merge.split(" ", 1)) for merge in header.require_list(_PREFIX + "merges", str)]
    backend = _with_bpe(header, vocab, merges, ignore_merges=style.ignore_merges)
    normalizer = build_normalizer(style)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = build_pre_tokenizer(style)
    backend.decoder = decoders.ByteLevel()
    return backend, style.adds_bos


def _pre_tokenization(header: GGUFHeader) -> PreTokenization:
    name = header.optional(_PREFIX + "pre", str, None)
    if name is None:
        logger.warning("%s does not name its pre-tokenizer; GPT-2's is taken, ids may differ", header.path)
        name = "default"
    style = PRE_TOKENIZATIONS.get(name)
    if style is None:
        known = ", ".join(PRE_TOKENIZATIONS)
        raise ValueError(f"{header.path}: pre-tokenizer {name!r} is not served; known: {known}")
    return style


def _sentencepiece(
    header: GGUFHeader, tokens: list[str], types: list[int], vocab: dict[str, int], unknown: str | None
) -> tokenizers.Tokenizer:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if header.metadata.get(_PREFIX + key):
            raise ValueError(f"{header.path}: {_PREFIX}{key} is set, and that normalisation is not served")
    scores = header.require_list(_PREFIX + "scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{header.path}: {len(tokens)} tokens but {len(scores)} scores")
    merges = merges_from_scores(tokens, types, scores)
    backend = _with_bpe(header, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = header.optional(_PREFIX + "add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace] if prefix else [replace])
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merge list behind a scored vocabulary: pairs whose union is a token, best score first."""
    ranked: list[tuple[float, int, str, str]] = []
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    for index, token in enumerate(tokens):
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _with_bpe(
    header: GGUFHeader, vocab: dict[str, int], merges: list[Any], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge of unknown tokens
        raise ValueError(f"{header.path}: the tokens and merges do not fit together: {error}") from error


def _token_types(header: GGUFHeader, count: int) -> list[int]:
    if _PREFIX + "token_type" not in header.metadata:
        return [_NORMAL] * count
    types: list[int] = header.require_list(_PREFIX + "token_type", int)
    if len(types) != count:
        raise ValueError(f"{header.path}: {count} tokens but {len(types)} token types")
    return types


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], roles: dict[str, str]
) -> None:
    """Control tokens and tokens with a role are special; user-defined ones are matched whole and shown."""
    with_role = set(roles.values())
    added: list[tokenizers.AddedToken] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN) or token in with_role:
            added.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_tokens(added)


def _add_ends(
    backend: tokenizers.Tokenizer,
    header: GGUFHeader,
    adds_bos: bool,
    vocab: dict[str, int],
    roles: dict[str, str],
) -> None:
    """BOS before and EOS after every text, where the metadata asks for it."""
    ends: dict[str, str] = {}
    for role, default in (("bos_token", adds_bos), ("eos_token", False)):
        if not header.optional(f"{_PREFIX}add_{role}", bool, default):
            continue
        if role not in roles:
            raise ValueError(f"{header.path}: every text should get a {role}, and the metadata names none")
        ends[role] = roles[role]
    if not ends:
        return
    first = ["bos_token"] if "bos_token" in ends else []
    last = ["eos_token"] if "eos_token" in ends else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1"],
        special_tokens=[
            {"id": role, "ids": [vocab[token]], "tokens": [token]} for role, token in ends.items()
        ],
    )


def _token(header: GGUFHeader, key: str, tokens: list[str]) -> str | None:
    index: int | None = header.optional(_PREFIX + key, int, None)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ValueError(f"{header.path}: {_PREFIX}{key} is {index}, the vocabulary has {len(tokens)} tokens")
    return tokens[index]


def _end_token_ids(header: GGUFHeader, tokens: list[str]) -> dict[int, str]:
    keys = [key for key in ("eot_token_id", "eom_token_id") if _token(header, key, tokens) is not None]
    return {header.require(_PREFIX + key, int): _PREFIX + key for key in keys}


def _chat_templates(header: GGUFHeader) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for name in header.metadata:
        if name == key:
            templates[DEFAULT_TEMPLATE] = header.require(name, str)
        elif name.startswith(key + "."):
            templates[name.removeprefix(key + ".")] = header.require(name, str)
    if key in header.metadata and f"{key}.{DEFAULT_TEMPLATE}" in header.metadata:
        raise ValueError(
            f"{header.path}: {key} and {key}.{DEFAULT_TEMPLATE} are both the chat template "
            f"{DEFAULT_TEMPLATE!r}, and which one is meant cannot be known; remove one of them"
        )
    return templates

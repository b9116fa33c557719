"""The tokenizer of a Hugging Face folder, without transformers.

Owns which files of the folder say what: tokenizer.json (the vocabulary), tokenizer_config.json and
special_tokens_map.json (roles of special tokens), chat_template.jinja. Read by `load_tokenizer`.
It must not run code from the folder.
"""

from __future__ import annotations

import pathlib
from typing import Any

import tokenizers

from sglang.srt.configs.json_file import read_json_object
from sglang.srt.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_hf_vocabulary(folder: pathlib.Path) -> Vocabulary:
    """Read the tokenizer files of a folder."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; a folder with only a slow tokenizer (tokenizer.model, "
            f"vocab.txt) is not served: load it once with transformers' AutoTokenizer and save it again, or "
            f"name a folder that has one with --tokenizer-path"
        )
    backend = _backend(file)
    config = _read_if_there(folder / "tokenizer_config.json")
    roles = {**_read_if_there(folder / "special_tokens_map.json"), **config}
    special_tokens = {role: text for role in ROLES if (text := _token_text(roles.get(role))) is not None}
    _add_missing_tokens(backend, config, folder)
    _mark_special(backend, special_tokens)
    return Vocabulary(
        backend=backend,
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
        source=folder,
    )


def _backend(file: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it dislikes in the file
        raise ValueError(
            f"{file} is not a tokenizer file that can be read: {error}; fetch it again"
        ) from error
    # Settings of some training run that would silently cut or lengthen a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_if_there(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A special token's text; files write it as a string or as an object with its matching rules."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: pathlib.Path) -> None:
    """Tokens that tokenizer_config.json adds and tokenizer.json does not know."""
    for key, row in _added_rows(config, folder):
        if backend.token_to_id(row["content"]) is not None:
            continue
        token = tokenizers.AddedToken(
            row["content"],
            single_word=bool(row.get("single_word", False)),
            lstrip=bool(row.get("lstrip", False)),
            rstrip=bool(row.get("rstrip", False)),
            normalized=bool(row.get("normalized", True)),
            special=bool(row.get("special", False)),
        )
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        given = backend.token_to_id(row["content"])
        if given != key:
            raise ValueError(
                f"{folder}: tokenizer_config.json gives the added token {row['content']!r} the id {key}, "
                f"the vocabulary of tokenizer.json would give it {given}; the two files are not of one "
                f"checkpoint"
            )


def _added_rows(config: dict[str, Any], folder: pathlib.Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of added_tokens_decoder by id."""
    rows = config.get("added_tokens_decoder") or {}
    sound = isinstance(rows, dict) and all(
        key.isascii() and key.isdecimal() and isinstance(row, dict) and isinstance(row.get("content"), str)
        for key, row in rows.items()
    )
    if not sound:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map token ids to objects with a "
            f"text under content"
        )
    return sorted(((int(key), row) for key, row in rows.items()), key=lambda item: item[0])


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
    """A token with a role is special, also where tokenizer.json forgot to say so."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(special_tokens.values())
        if text not in marked and backend.token_to_id(text) is not None
    ]
    if missing:
        backend.add_special_tokens(missing)


def _chat_templates(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; the file of its own wins over the config."""
    templates: dict[str, str] = {}
    value, source = config.get("chat_template"), folder / "tokenizer_config.json"
    if value is None:
        source = folder / "chat_template.json"
        value = _read_if_there(source).get("chat_template")
    if isinstance(value, str):
        templates[DEFAULT_TEMPLATE] = value
    elif isinstance(value, list):
        templates.update(_named_templates(value, source))
    elif value is not None:
        raise ValueError(
            f"{source}: chat_template is a {type(value).__name__}; it must be a text, or a list of objects "
            f"with name and template; correct it or leave it out"
        )
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(file)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        if extra.stem == DEFAULT_TEMPLATE and file.is_file():
            raise ValueError(
                f"{folder}: {file.name} and additional_chat_templates/{extra.name} both hold the chat "
                f"template {DEFAULT_TEMPLATE!r}; remove one of them"
            )
        templates[extra.stem] = _read_text(extra)
    return templates


def _named_templates(rows: list[Any], source: pathlib.Path) -> dict[str, str]:
    """Older files write several templates as rows."""
    templates: dict[str, str] = {}
    for row in rows:
        words = (row.get("name"), row.get("template")) if isinstance(row, dict) else (None,)
        if not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"{source}: a row of chat_template must be an object with the texts name and template, "
                f"got {str(row)[:80]}; correct it or leave it out"
            )
        if row["name"] in templates:
            raise ValueError(
                f"{source}: two rows of chat_template have the name {row['name']!r}, and which one is meant "
                f"cannot be known; remove or rename one of them"
            )
        templates[row["name"]] = row["template"]
    return templates


def _read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from error

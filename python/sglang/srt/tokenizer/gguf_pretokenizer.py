"""How byte-level vocabularies in GGUF files cut a text before their merges run.

Owns the table from the metadata value `tokenizer.ggml.pre` to a pre-tokenizer. Read by the GGUF tokenizer
only. It must not guess: an unknown name is refused, since a wrong cut gives wrong ids in silence.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_LIKE = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _LLAMA3_LIKE.replace("{DIGITS}", "{1,3}")
_QWEN2 = _LLAMA3_LIKE.replace("{DIGITS}", "")


class PreTokenization(NamedTuple):
    """One family of cuts. `pattern` None is GPT-2's own pattern."""

    pattern: str | None
    single_digits: bool = False
    nfc: bool = False
    # A piece that is a vocabulary entry is taken whole, without its merges.
    ignore_merges: bool = False
    # Whether a text begins with BOS where the file does not say.
    adds_bos: bool = False


_GPT2_STYLE = PreTokenization(None)
_DIGITS_STYLE = PreTokenization(None, single_digits=True)
_LLAMA3_STYLE = PreTokenization(_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN2_STYLE = PreTokenization(_QWEN2, nfc=True)

PRE_TOKENIZATIONS = {
    "default": _GPT2_STYLE,
    "gpt-2": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "mpt": _GPT2_STYLE,
    "olmo": _GPT2_STYLE,
    "smollm": _DIGITS_STYLE,
    "starcoder": _DIGITS_STYLE,
    "refact": _DIGITS_STYLE,
    "command-r": _DIGITS_STYLE,
    "codeshell": _DIGITS_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "qwen2": _QWEN2_STYLE,
    "deepseek-r1-qwen": _QWEN2_STYLE,
}


def build_normalizer(style: PreTokenization) -> normalizers.Normalizer | None:
    return normalizers.NFC() if style.nfc else None


def build_pre_tokenizer(style: PreTokenization) -> pre_tokenizers.PreTokenizer:
    if style.pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(style.pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not style.single_digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])

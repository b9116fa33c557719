"""The printable alphabet that byte-level vocabularies are written in.

Owns the two-way map between the 256 byte values and the visible characters that stand for them.
Read by the tokenizer facade (exact bytes of a token), the GGUF tokenizer and the tiny test models.
It must not know any particular vocabulary.
"""

from __future__ import annotations

# Bytes that already are a visible Latin-1 character stand for themselves; the others borrow from U+0100 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _build_alphabet() -> tuple[str, ...]:
    visible = frozenset(_VISIBLE)
    alphabet: list[str] = []
    borrowed = 0x100
    for value in range(256):
        if value in visible:
            alphabet.append(chr(value))
        else:
            alphabet.append(chr(borrowed))
            borrowed += 1
    return tuple(alphabet)


# BYTE_TO_CHAR[b] is the character that stands for byte b; CHAR_TO_BYTE is the way back.
BYTE_TO_CHAR: tuple[str, ...] = _build_alphabet()
CHAR_TO_BYTE: dict[str, int] = {char: value for value, char in enumerate(BYTE_TO_CHAR)}


def piece_to_bytes(piece: str) -> bytes | None:
    """The bytes that a vocabulary entry stands for, or None when it is not written in the byte alphabet."""
    out = bytearray()
    for char in piece:
        value = CHAR_TO_BYTE.get(char)
        if value is None:
            return None
        out.append(value)
    return bytes(out)

"""Whole numbers as people write them: 4096, 4k, 25.6k, 1M, 4Ki, 1Mi.

Used for the fields declared with `human_int=True`. Case matters: k is 1000, Ki is 1024.
"""

from decimal import Decimal, InvalidOperation

_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_EXAMPLES = "write it as 4096, 4k, 25.6k, 1M, 4Ki or 1Mi"


def parse_human_int(text: str) -> int:
    text = text.strip()
    for suffix, factor in _BINARY.items():
        if text.endswith(suffix):
            digits = text[: -len(suffix)]
            if not digits.lstrip("+-").isdecimal():
                raise ValueError(f"{text!r}: {suffix} takes a whole number before it; {_EXAMPLES}")
            return int(digits) * factor
    factor = _DECIMAL.get(text[-1:], 1)
    try:
        value = Decimal(text[:-1] if factor > 1 else text) * factor
        whole = int(value)
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a number; {_EXAMPLES}") from error
    if whole != value:
        raise ValueError(f"{text!r} is not a whole number; {_EXAMPLES}")
    return whole

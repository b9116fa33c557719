"""Owns what the value of a request field may be: a text, a flag, a number, token ids.

Read by the OpenAI protocol, the native request and the sampling parameters. Every check takes the field's
name and the client's value, and returns the value or raises `RequestRejected` that names both. It must not
know what a field means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from sglang.srt.messages.errors import refused

T = TypeVar("T")
#: Judges the value of the field of this name.
Check = Callable[[str, object], T]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def shown(value: object) -> str:
    """A client's value inside an error text, cut so that a megabyte of it does not come back."""
    return cut(repr(value))


def cut(text: str) -> str:
    """A client's words inside an error text, at most 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."


def text(name: str, value: object) -> str:
    """A string that has an encoding: Python's can hold half of a surrogate pair."""
    if not isinstance(value, str):
        raise refused(name, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(name, "is not valid Unicode: it holds half of a surrogate pair") from error
    return value


def flag(name: str, value: object) -> bool:
    """True or false; no number stands for one of them."""
    if not isinstance(value, bool):
        raise refused(name, f"must be true or false, got {shown(value)}")
    return value


def integer(name: str, value: object) -> int:
    """A whole number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(name, f"must be an integer, got {shown(value)}")
    return value


def integer_in(low: int, high: int = INT64_MAX, *, also: int | None = None) -> Check[int]:
    """A check for `low <= value <= high`; `also` is one more legal value, outside that range."""

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            bounds = f" with {low} <= {name} <= {high}" if high < INT64_MAX else ""
            raise refused(name, f"must be an integer{bounds}, got {shown(value)}")
        if value != also and not low <= value <= high:
            extra = f" or {also}" if also is not None else ""
            raise refused(name, f"must satisfy {low} <= {name} <= {high}{extra}, got {shown(value)}")
        return value

    return check


def number_in(low: float, high: float, *, open_low: bool = False) -> Check[float]:
    """A check for a finite `low <= value <= high`; with `open_low` the low end itself is illegal."""

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(name, f"must be a number, got {shown(value)}")
        # An integer may be too large for a float.
        number = float(value) if isinstance(value, float) or abs(value) < 10**300 else math.inf
        if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            left = "<" if open_low else "<="
            raise refused(name, f"must satisfy {low:g} {left} {name} <= {high:g}, got {shown(value)}")
        return number

    return check


def json_object(name: str, value: object) -> Mapping[str, object]:
    """A mapping, as a JSON object becomes one."""
    if not isinstance(value, Mapping):
        raise refused(name, f"must be an object, got {shown(value)}")
    return value


def json_list(name: str, value: object) -> list[object]:
    """A list, whatever is in it."""
    if not isinstance(value, list):
        raise refused(name, f"must be a list, got {shown(value)}")
    return value


def token_ids(name: str, value: object) -> list[int]:
    """A list of integers; whether the vocabulary has them is checked where it is known."""
    # By type, because true and false count as integers in Python; as a set, because a prompt may be long.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise refused(name, f"must be a list of token ids, got {shown(value)}")
    return value


def prompt_ids(name: str, value: object) -> list[int]:
    """Token ids, at least one."""
    ids = token_ids(name, value)
    if not ids:
        raise refused(name, "the prompt is empty; give at least one token")
    return ids


def or_none(check: Check[T]) -> Check[T | None]:
    """A check that lets None pass: the field was not given."""
    return lambda name, value: None if value is None else check(name, value)


def check_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    """Refuse token ids outside `0 <= id < vocab_size`, naming the first one."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise refused(name, f"token id {wrong} is outside the vocabulary (0 <= id < {vocab_size})")

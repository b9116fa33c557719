"""Owns the end of an error about a name that does not exist: the names that are spelt like it."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: tp_size`, or nothing when no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; nearest: {', '.join(near)}" if near else ""

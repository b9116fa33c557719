"""Owns the log lines about fields that no server knows: one for each name, up to a limit.

Used by the OpenAI routes, where clients add keys of their own, so such a key is no error. It must never log
a value, and it bounds what a client can make it remember.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection

logger = logging.getLogger(__name__)

MAX_NAMES = 100
_SHOWN = 60


class UnknownFields:
    """The unknown names that one route has met so far."""

    def __init__(self, path: str, known: Collection[str]) -> None:
        self._path = path
        self._known = list(known)
        self._met: set[str] = set()

    def note(self, name: str) -> None:
        """Log a name the first time, with the nearest known one: most likely it is misspelt."""
        clipped = name[:_SHOWN]
        if clipped in self._met or len(self._met) > MAX_NAMES:
            return
        self._met.add(clipped)
        if len(self._met) > MAX_NAMES:
            logger.warning("%s: more unknown fields are ignored from here on without a word", self._path)
            return
        near = difflib.get_close_matches(clipped, self._known, n=1)
        hint = f"; did its sender mean {near[0]}?" if near else ""
        logger.warning("%s: the unknown field %s is ignored%s", self._path, ascii(clipped), hint)

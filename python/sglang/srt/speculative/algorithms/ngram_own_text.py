"""Owns what NGRAM finds in a request's own text, prompt and answer: what followed its end the last time.

Read by the NGRAM drafter, for one request at a time. It keeps nothing, so no other request can meet it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["LEAST_MATCH", "OWN_TEXT", "continuation"]

#: The last tokens of a text that are looked through.
OWN_TEXT = 2048
#: Tokens that an end must have in common with an earlier place: what followed fewer says little.
LEAST_MATCH = 2
#: Longer ends are all alike.
_LONGEST_MATCH = 16


def continuation(token_ids: Sequence[int], count: int) -> tuple[list[int], int]:
    """The up to `count` tokens after the earlier place that shares the longest end with the text.

    With them how long that end is, of several places the latest one; no tokens and 0 where it is shorter than
    `LEAST_MATCH`.
    """
    text = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    places = np.flatnonzero(text[:-1] == text[-1])
    length = 1 if len(places) else 0
    while 0 < length < min(_LONGEST_MATCH, len(text) - 1):
        longer = places[places >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    if length < LEAST_MATCH:
        return [], 0
    first = int(places[-1]) + 1
    return text[first : first + count].tolist(), length

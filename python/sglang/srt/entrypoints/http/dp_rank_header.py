"""Owns the header that states the replica of a request, the same on every route that generates.

It must not know how many replicas there are: that is checked where the request is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sglang.srt.messages.errors import RequestRejected

DP_RANK_HEADER = "x-data-parallel-rank"
#: Every number of so many characters fits 64 bits.
_MOST_DIGITS = 18


def dp_rank_of_header(headers: Mapping[str, str]) -> int | None:
    """The replica that the header states; it wins over the body. Whether there is such a replica is checked
    later.
    """
    stated = [value for name, value in headers.items() if name == DP_RANK_HEADER]
    if not stated:
        return None
    given = ", ".join(stated)  # as HTTP reads a header that is repeated
    shown = repr(given if len(given) <= 40 else given[:37] + "...")
    if not re.fullmatch(r"-?[0-9]+", given):
        raise _header_refused(f"must be an integer, got {shown}")
    if len(given) > _MOST_DIGITS:
        raise _header_refused(f"must fit 64 bits, got {shown}")
    return int(given)


def _header_refused(rule: str) -> RequestRejected:
    return RequestRejected(f"routed_dp_rank: the header X-Data-Parallel-Rank {rule}", param="routed_dp_rank")

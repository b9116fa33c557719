"""Owns the header that names the replica of a request, the same on every route that generates.

Read by the native and OpenAI routes. It must not know how many replicas there are: the request's check does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sglang.srt.messages.errors import refused
from sglang.srt.messages.request_fields import shown

DP_RANK_HEADER = "x-data-parallel-rank"
#: Every number of so many characters fits 64 bits.
_MOST_DIGITS = 18


def dp_rank_of_header(headers: Mapping[str, str]) -> int | None:
    """The replica that the header names, which wins over the body; whether it exists is checked later."""
    stated = [value for name, value in headers.items() if name == DP_RANK_HEADER]
    if not stated:
        return None
    given = ", ".join(stated)  # as HTTP reads a header that is repeated
    if not re.fullmatch(r"-?[0-9]+", given):
        rule = "must be an integer"
    elif len(given) > _MOST_DIGITS:
        rule = "must fit 64 bits"
    else:
        return int(given)
    raise refused("routed_dp_rank", f"the header X-Data-Parallel-Rank {rule}, got {shown(given)}")

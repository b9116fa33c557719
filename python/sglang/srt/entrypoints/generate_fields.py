"""Owns the keys of a native generate request: which exist, which have another name, which are not served yet;
and the header that states a replica.

Used by `/generate`, by `Engine.generate` and, for the header, by the OpenAI routes. It must stay free of the
web framework, and leaves the values to the tokenizer manager.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput

_TEXT_ONLY = "only text and token ids are served; leave it out"
_LATER = "is not supported yet; leave it out"
#: Keys of SGLang's request that this server does not serve: null, false and empty are accepted, anything else
#: is refused.
NOT_SERVED: dict[str, str] = {
    "input_embeds": _TEXT_ONLY,
    "image_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "return_hidden_states": _LATER,
    "return_routed_experts": _LATER,
    "return_entropy": _LATER,
    "lora_path": _LATER,
    "session_id": _LATER,
    "session_params": _LATER,
    "custom_logit_processor": _LATER,
    "bootstrap_host": _LATER,
    "bootstrap_port": _LATER,
    "bootstrap_room": _LATER,
    "routing_key": _LATER,
    "kv_hints": _LATER,
    "max_thinking_tokens": _LATER,
    "log_metrics": "metrics are not supported yet; leave it out",
    "custom_labels": "metrics are not supported yet; leave it out",
}
_ALIASES = {"data_parallel_rank": "routed_dp_rank"}
DP_RANK_HEADER = "x-data-parallel-rank"
#: Every number of so many characters fits 64 bits.
_MOST_DIGITS = 18


def parse_generate(body: Any) -> GenerateReqInput:
    """A JSON body as a request; every refusal names the key."""
    if not isinstance(body, dict):
        raise RequestRejected(f"the body must be a JSON object, got {type(body).__name__}")
    fields: dict[str, Any] = {}
    known = GenerateReqInput.__struct_fields__
    for key, value in body.items():
        name = _ALIASES.get(key, key)
        if name in NOT_SERVED:
            if value not in (None, False, "", [], {}):
                raise RequestRejected(f"{key}: {NOT_SERVED[name]}", param=key)
        elif name not in known:
            near = difflib.get_close_matches(key, [*known, *NOT_SERVED], n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known keys are {', '.join(known)}"
            name = key if len(key) <= 80 else key[:77] + "..."
            raise RequestRejected(f"{name}: unknown key{hint}", param=name)
        elif value is not None:
            if fields.get(name, value) != value:
                raise RequestRejected(f"{key}: another name of {name}, and both are given", param=key)
            fields[name] = value
    return GenerateReqInput(**fields)


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

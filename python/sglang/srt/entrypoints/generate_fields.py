"""Owns the keys of a native generate request: which exist, which have another name, which are not served yet.

Used by `/generate` and by `Engine.generate`. It must stay free of the web framework, and leaves the values to
the tokenizer manager.
"""

from __future__ import annotations

import difflib
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
            fields[name] = value
    return GenerateReqInput(**fields)

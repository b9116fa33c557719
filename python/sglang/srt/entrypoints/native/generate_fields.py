"""Owns the keys of a native generate request: which exist, which have another name, which are refused.

Used by `/generate` and by `Engine.generate`. It must stay free of the web framework, and leaves the values to
the tokenizer manager.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.openai.protocol import PATHS, acting_fields, refused_elsewhere
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.request_fields import cut
from sglang.srt.messages.unserved_fields import WITHOUT_EFFECT, unserved
from sglang.srt.sampling.sampling_params import SamplingParams

_KNOWN = GenerateReqInput.__struct_fields__
_KNOWN_SAMPLING = SamplingParams.__struct_fields__
_ALIASES = {"data_parallel_rank": "routed_dp_rank"}


def parse_generate(body: object) -> GenerateReqInput:
    """A JSON body as a request; every refusal names the key."""
    if not isinstance(body, Mapping):
        raise RequestRejected(f"the body must be a JSON object, got {type(body).__name__}")
    fields: dict[str, Any] = {}
    for key, value in body.items():
        name = _ALIASES.get(key, key)
        if name not in _KNOWN:
            _refuse_unless_harmless(key, value, _KNOWN, "")
        elif name == "sampling_params":
            fields[name] = _known_sampling(value)
        elif value is not None:
            if fields.get(name, value) != value:
                raise refused(key, f"another name of {name}, and both are given")
            fields[name] = value
    return GenerateReqInput(**fields)


def _known_sampling(given: object) -> object:
    """The sampling parameters without keys that ask for nothing; what is no object is refused further on."""
    if isinstance(given, list):
        return [_known_sampling(one) for one in given]
    if not isinstance(given, dict):
        return given
    for key, value in given.items():
        if key not in _KNOWN_SAMPLING:
            _refuse_unless_harmless(key, value, _KNOWN_SAMPLING, "sampling_params: ")
    return {key: value for key, value in given.items() if key in _KNOWN_SAMPLING}


def _refuse_unless_harmless(given: object, value: object, known: Sequence[str], where: str) -> None:
    """A key that would be ignored is 400, unless another server knows it and it asks for nothing."""
    not_served = {**refused_elsewhere("generate"), **unserved("generate")[0]}
    key = str(given)  # from Python it may be anything
    if key in WITHOUT_EFFECT or (key in not_served and not_served[key].allows(value)):
        return
    name = cut(key)
    if key in not_served:
        raise refused(name, not_served[key].reason)
    raise RequestRejected(f"{where}{name}: unknown key; {_hint(key, known)}", param=name)


def _hint(key: str, known: Sequence[str]) -> str:
    for own, place in ((_KNOWN_SAMPLING, "belongs into sampling_params"), (_KNOWN, "belongs beside it")):
        if key in own:
            return f"{key} {place}"
    for route in PATHS:
        field = acting_fields(route).get(key)
        if field is not None:
            meant = field.same_as or key
            native = acting_fields(route)[meant].sampling or meant
            if native in (*_KNOWN, *_KNOWN_SAMPLING):
                return f"here it is {native}" + (", in sampling_params" if native in _KNOWN_SAMPLING else "")
            return f"it is a field of {PATHS[route]}"
    near = difflib.get_close_matches(key, [*known, *unserved("generate")[0]], n=1)
    return f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"

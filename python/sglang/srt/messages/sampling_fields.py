"""Owns what a client may ask of sampling: the range of each parameter, and how a mapping becomes one record.

Read by the request side, by the check of a model's generation defaults, and by the scheduler for the
vocabulary. It must not know which route a request came by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.messages.errors import refused
from sglang.srt.messages.request_fields import (
    INT64_MIN,
    Check,
    check_vocabulary,
    cut,
    flag,
    integer_in,
    number_in,
    or_none,
    shown,
    text,
    token_ids,
)
from sglang.srt.sampling.sampling_params import SamplingParams

MAX_SAMPLES = 128
MAX_STOP_STRINGS = 32
#: A stop string is looked for at every token, in a text that is decoded anew as far back as it reaches.
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 4096
#: More than any vocabulary has.
MAX_LOGIT_BIAS = 2**18

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_BIAS = number_in(-100.0, 100.0)


def sampling_params_of(
    given: Mapping[str, object] | None, defaults: Mapping[str, object] | None = None
) -> SamplingParams:
    """Checked parameters of a client's mapping, where a value of None means "use the default".

    `defaults` (the model's generation defaults) fill what the client left out. Raises `RequestRejected` that
    names the field, the rule and the value; token ids are held against the vocabulary by `check_sampled_ids`.
    """
    values = {name: value for name, value in (defaults or {}).items() if value is not None}
    for name, value in (given or {}).items():
        if name not in _CHECKS:
            raise refused(cut(str(name)), f"unknown sampling parameter; known are {', '.join(_CHECKS)}")
        if value is not None or name == "max_new_tokens":
            values[name] = value
    checked: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in values.items()}
    params = SamplingParams(**checked)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        least, most = params.min_new_tokens, params.max_new_tokens
        raise refused("min_new_tokens", f"must not exceed max_new_tokens, got {least} > {most}")
    return params


def check_sampled_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a bias or a stop id for a token that the vocabulary does not have."""
    check_vocabulary("logit_bias", list(params.logit_bias or ()), vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)


def _stop_strings(name: str, value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise refused(name, f"must be a string or a list of strings, got {shown(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise refused(name, f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise refused(name, "a stop string must not be empty")
        if len(stop) > MAX_STOP_LENGTH:
            rule = f"a stop string has at most {MAX_STOP_LENGTH} characters, got one of {len(stop)}"
            raise refused(name, rule)
        text(name, stop)
    return list(stops)


def _stop_ids(name: str, value: object) -> list[int]:
    ids = token_ids(name, list(value) if isinstance(value, tuple) else value)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise refused(name, f"at most {MAX_STOP_TOKEN_IDS} token ids, got {len(ids)}")
    return ids


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise refused(name, f"must map token ids to numbers, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise refused(name, f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        digits = str(key)
        if isinstance(key, bool) or not _TOKEN_ID.fullmatch(digits):
            raise refused(name, f"keys must be token ids, got {shown(key)}")
        token_id = int(digits)
        if token_id in bias:
            raise refused(name, f"token id {token_id} is there twice")
        bias[token_id] = _BIAS(f"{name}[{digits}]", amount)
    return bias


_CHECKS: dict[str, Check[object]] = {
    "max_new_tokens": or_none(integer_in(0)),
    "min_new_tokens": integer_in(0),
    "temperature": number_in(0.0, 1e6),
    "top_p": number_in(0.0, 1.0, open_low=True),
    "top_k": integer_in(1, also=-1),
    "min_p": number_in(0.0, 1.0),
    "frequency_penalty": number_in(-2.0, 2.0),
    "presence_penalty": number_in(-2.0, 2.0),
    "repetition_penalty": number_in(0.0, 2.0, open_low=True),
    "n": integer_in(1, MAX_SAMPLES),
    "stop": _stop_strings,
    "stop_token_ids": _stop_ids,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "stream_interval": integer_in(1),
    "logit_bias": _logit_bias,
    "sampling_seed": integer_in(INT64_MIN),
}

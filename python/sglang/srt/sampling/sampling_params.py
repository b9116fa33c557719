"""The sampling parameters of one request: names, defaults and ranges.

Read by the native route, the OpenAI routes and the Engine, by the scheduler and by the sampler. It must not
know tensors, tokenizers or transports: whoever has a vocabulary passes its size to `verify_vocabulary`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

#: A temperature below this is greedy: dividing logits by it would overflow.
GREEDY_TEMPERATURE = 1e-6
MAX_STOP_STRINGS = 32
#: At each token, as much text as the longest stop string is decoded again and searched.
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 4096
#: More than any vocabulary has; `verify_vocabulary` knows the exact bound.
MAX_LOGIT_BIAS = 2**18
MAX_SAMPLES = 128
INT64_MAX = 2**63 - 1

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of one request are drawn and when it ends (SGLang's names and defaults).

    `max_new_tokens=None` means "up to the context length". `top_k=-1` is off. `temperature` below
    `GREEDY_TEMPERATURE` is greedy. `logit_bias` maps token ids to an additive bias.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token after penalties and bias is taken, the lowest id among equals."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @classmethod
    def from_request(
        cls, given: Mapping[str, object] | None, defaults: Mapping[str, object] | None = None
    ) -> SamplingParams:
        """Build checked parameters from a client's mapping; `None` values mean "use the default".

        `defaults` (the model's generation defaults) fill what the client left out. Raises `ValueError` that
        names the field, the rule and the value; vocabulary bounds are checked later by `verify_vocabulary`.
        """
        values: dict[str, Any] = {k: v for k, v in (defaults or {}).items() if v is not None}
        for name, value in (given or {}).items():
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                raise ValueError(f"{_shown(name)}: unknown sampling parameter; known are {known}")
            if value is not None or name == "max_new_tokens":
                values[name] = value
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if "logit_bias" in values:
            values["logit_bias"] = _checked_logit_bias(values["logit_bias"])
        for name, value in values.items():
            values[name] = _CHECKS[name](name, value)
        params = cls(**values)
        if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: must not exceed max_new_tokens, "
                f"got {params.min_new_tokens} > {params.max_new_tokens}"
            )
        return params

    def verify_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside `0 <= id < vocab_size` (`ValueError` naming the field and the id)."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{name}: token id {token_id} is outside the vocabulary (0 <= id < {vocab_size})"
                    )


def _shown(value: object) -> str:
    """A client's value for an error text, cut short."""
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: must be a number, got {_shown(value)}")
        number = float(value) if abs(value) < 1e300 or isinstance(value, float) else math.inf
        if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            left = "<" if open_low else "<="
            raise ValueError(f"{name}: must satisfy {low:g} {left} {name} <= {high:g}, got {value!r}")
        return number

    return check


def _integer(
    low: int, high: int = INT64_MAX, *, also: int | None = None, none_ok: bool = False
) -> Callable[[str, object], int | None]:
    def check(name: str, value: object) -> int | None:
        if value is None and none_ok:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}: must be an integer, got {_shown(value)}")
        if value != also and not low <= value <= high:
            extra = f" or {also}" if also is not None else ""
            raise ValueError(f"{name}: must satisfy {low} <= {name} <= {high}{extra}, got {value}")
        return value

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, got {_shown(value)}")
    return value


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which a Python string can hold and no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stop_strings(name: str, value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name}: must be a string or a list of strings, got {_shown(value)}")
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"{name}: at most {MAX_STOP_STRINGS} stop strings, got {len(value)}")
    if any(text == "" for text in value):
        raise ValueError(f"{name}: a stop string must not be empty")
    for text in value:
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(
                f"{name}: a stop string has at most {MAX_STOP_LENGTH} characters, got one of {len(text)}"
            )
        if not is_unicode(text):
            raise ValueError(f"{name}: is not valid Unicode: it holds half of a surrogate pair")
    return list(value)


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name}: must be a list of token ids, got {_shown(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"{name}: at most {MAX_STOP_TOKEN_IDS} token ids, got {len(value)}")
    return list(value)


def _checked_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias: must map token ids to numbers, got {_shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        text = str(key)
        if isinstance(key, bool) or not _TOKEN_ID.fullmatch(text):
            raise ValueError(f"logit_bias: keys must be token ids, got {_shown(key)}")
        if int(text) in bias:
            raise ValueError(f"logit_bias: token id {int(text)} is there twice")
        bias[int(text)] = _number(-100.0, 100.0)(f"logit_bias[{text}]", amount)
    return bias


#: Parameter -> its check, called with name and value, which returns the value to keep.
_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_new_tokens": _integer(0, none_ok=True),
    "min_new_tokens": _integer(0),
    "temperature": _number(0.0, 1e6),
    "top_p": _number(0.0, 1.0, open_low=True),
    "top_k": _integer(1, also=-1),
    "min_p": _number(0.0, 1.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 2.0, open_low=True),
    "n": _integer(1, MAX_SAMPLES),
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "no_stop_trim": _flag,
    "stream_interval": _integer(1),
    "logit_bias": lambda _name, value: value,
    "sampling_seed": _integer(-INT64_MAX - 1),
}

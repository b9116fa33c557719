"""Owns how one native request, single or batch, becomes single prompts: which value belongs to which.

Used by the tokenizer manager before anything is checked against the model. It must not tokenize, send or
default sampling values.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.sampling.sampling_params import MAX_SAMPLES, is_unicode


class SinglePrompt(msgspec.Struct, kw_only=True):
    """One prompt of a request with its own values. `rid` is the parent's when `n` is above 1."""

    rid: str
    text: str | None
    input_ids: list[int] | None
    sampling: Mapping[str, Any]
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    namespace: str | None
    routed_dp_rank: int | None = None


def split_request(obj: GenerateReqInput) -> list[SinglePrompt]:
    """The prompts of a request, in order. Fills `obj.rid` when the client named none, so that it can be
    aborted.
    """
    prompts = _prompts(obj)
    count = len(prompts) if obj.is_batch else None
    rids = _rids(obj, count)
    _refuse_lists_with_samples(obj)
    singles = []
    for i, prompt in enumerate(prompts):

        def one(name: str, check: Callable[[str, Any], Any], i: int = i) -> Any:
            return check(name, _value_of(obj, name, i, count))

        singles.append(
            SinglePrompt(
                rid=rids[i],
                text=prompt if isinstance(prompt, str) else None,
                input_ids=prompt if isinstance(prompt, list) else None,
                sampling=one("sampling_params", _mapping),
                return_logprob=one("return_logprob", _flag),
                logprob_start_len=one("logprob_start_len", _integer),
                top_logprobs_num=one("top_logprobs_num", _integer),
                token_ids_logprob=one("token_ids_logprob", _ids_or_none),
                namespace=cache_namespace(one("extra_key", _text_or_none), one("cache_salt", _text_or_none)),
                routed_dp_rank=one("routed_dp_rank", _integer_or_none),
            )
        )
    return singles


def count_sequences(obj: GenerateReqInput) -> int:
    """How many sequences a request asks for, as far as it is well formed; cheap, whatever its size."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    sampling = obj.sampling_params
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    samples = first.get("n") if isinstance(first, Mapping) else None
    if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
        samples = 1  # left out, or refused by name further on
    return (len(prompts or ()) if obj.is_batch else 1) * samples


def cache_namespace(extra_key: str | None, cache_salt: str | None) -> str | None:
    """One name for the prefix cache out of both; written as JSON so that no two pairs give the same name."""
    if extra_key is None and cache_salt is None:
        return None
    return json.dumps([extra_key, cache_salt])


def rejected(name: str, rule: str) -> RequestRejected:
    """A refusal that names its field."""
    return RequestRejected(f"{name}: {rule}", param=name)


def _prompts(obj: GenerateReqInput) -> list[str | list[int]]:
    if (obj.text is None) == (obj.input_ids is None):
        given = "both" if obj.text is not None else "none"
        raise RequestRejected(f"exactly one of text and input_ids must be given, got {given}", param="text")
    name, value = ("text", obj.text) if obj.text is not None else ("input_ids", obj.input_ids)
    if name == "text":
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise rejected("text", f"must be a string or a list of strings, got {shown(value)}")
    elif not isinstance(value, list):
        raise rejected(
            "input_ids", f"must be a list of token ids or a list of such lists, got {shown(value)}"
        )
    elif not obj.is_batch and value:
        return [_ids("input_ids", value)]
    if not value:
        raise rejected(name, "the prompt is empty; give at least one token")
    if name == "input_ids":
        return [_ids("input_ids", item) for item in value]
    return [item for item in value if isinstance(item, str)]


def _rids(obj: GenerateReqInput, count: int | None) -> list[str]:
    if obj.rid is None:
        obj.rid = uuid.uuid4().hex
    if isinstance(obj.rid, str):
        if not obj.rid:
            raise rejected("rid", "must not be empty; leave it out to get one")
        _text_or_none("rid", obj.rid)
        return [obj.rid] if count is None else [f"{obj.rid}_{i}" for i in range(count)]
    if not isinstance(obj.rid, list) or not all(isinstance(rid, str) and rid for rid in obj.rid):
        raise rejected("rid", f"must be a string, or a list of them for a batch, got {shown(obj.rid)}")
    if count is None:
        raise rejected("rid", "a list of ids needs a batch of prompts")
    if len(obj.rid) != count:
        raise rejected("rid", f"must have one entry for each of the {count} prompts, got {len(obj.rid)}")
    for rid in obj.rid:
        _text_or_none("rid", rid)
    return list(obj.rid)


#: Fields that are a list even for one prompt.
_LISTS_BY_NATURE = frozenset({"token_ids_logprob"})


def _value_of(obj: GenerateReqInput, name: str, i: int, count: int | None) -> Any:
    """The value for prompt `i`: one value for all, or the i-th of a list of the batch's length."""
    value = getattr(obj, name)
    if name in _LISTS_BY_NATURE:
        per_prompt = (
            isinstance(value, list) and bool(value) and (value[0] is None or isinstance(value[0], list))
        )
    else:
        per_prompt = isinstance(value, list)
    if not per_prompt:
        return value
    if count is None:
        raise rejected(name, "a list of values needs a batch of prompts")
    if len(value) != count:
        raise rejected(name, f"must have one entry for each of the {count} prompts, got {len(value)}")
    return value[i]


def _refuse_lists_with_samples(obj: GenerateReqInput) -> None:
    """Which list entry belongs to which of n samples has no good answer."""
    sampling = obj.sampling_params
    every = sampling if isinstance(sampling, list) else [sampling]
    counts = {
        item.get("n") or 1
        for item in every
        if isinstance(item, Mapping) and isinstance(item.get("n") or 1, int)
    }
    if len(counts) > 1:
        raise rejected("n", f"must be the same for all prompts of a batch, got {sorted(counts)}")
    if counts - {1}:
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(getattr(obj, name), list):
                raise rejected(name, "a list of values cannot be combined with n above 1")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise rejected(name, f"must be an object, got {shown(value)}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise rejected(name, f"must be true or false, got {shown(value)}")
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise rejected(name, f"must be an integer, got {shown(value)}")
    return value


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _text_or_none(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise rejected(name, f"must be a string, got {shown(value)}")
    if value is not None and not is_unicode(value):
        raise rejected(name, "is not valid Unicode: it holds half of a surrogate pair")
    return value


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise rejected(name, f"must be a list of token ids, got {shown(value)}")
    if not value:
        raise rejected(name, "the prompt is empty; give at least one token")
    return value


def _ids_or_none(name: str, value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise rejected(name, f"must be a list of token ids, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A client's value inside an error text; a megabyte of it does not come back."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

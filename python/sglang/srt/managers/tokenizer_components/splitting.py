"""Owns how one native request, single or batch, becomes single prompts: which value belongs to which.

Used by `RequestPreparer`. Types are checked here, and sampling values against their ranges; what depends on
the model is `validation`'s. It must not tokenize or send.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.request_fields import (
    Check,
    flag,
    integer,
    json_object,
    or_none,
    prompt_ids,
    shown,
    text,
    token_ids,
)
from sglang.srt.messages.sampling_fields import MAX_SAMPLES, sampling_params_of
from sglang.srt.messages.unserved_fields import REFUSED
from sglang.srt.sampling.sampling_params import SamplingParams

T = TypeVar("T")


class SinglePrompt(msgspec.Struct, kw_only=True):
    """One prompt of a request with its own values. `rid` is the parent's when `n` is above 1."""

    rid: str
    text: str | None
    input_ids: list[int] | None
    params: SamplingParams
    #: False where `max_new_tokens` is a default: it may be cut to what fits.
    limit_is_clients: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    namespace: str | None
    routed_dp_rank: int | None = None


def split_request(
    obj: GenerateReqInput,
    *,
    defaults: Mapping[str, object] | None = None,
    check_room: Callable[[int], None] | None = None,
) -> Iterator[SinglePrompt]:
    """The prompts of a request, in order. Fills `obj.rid` where the client named none.

    `defaults` fill sampling values that the client left out. `check_room` gets the number of sequences before
    anything of that size is built.
    """
    _check_whole_request(obj)
    count = _batch_size(obj)
    if check_room is not None:
        check_room((1 if count is None else count) * _num_samples(obj))
    name, prompts = _prompts(obj, is_batch=count is not None)
    check: Check[str | list[int]] = text if name == "text" else prompt_ids
    rids = _rids(obj, count)
    _refuse_lists_with_samples(obj)
    for i, given in enumerate(prompts):

        def value(name: str, check: Check[T], i: int = i) -> T:
            return check(name, _value_of(obj, name, i, count))

        prompt = check(name, given)
        sampling = value("sampling_params", or_none(json_object)) or {}
        yield SinglePrompt(
            rid=rids[i],
            text=prompt if isinstance(prompt, str) else None,
            input_ids=prompt if isinstance(prompt, list) else None,
            params=sampling_params_of(sampling, defaults),
            limit_is_clients=sampling.get("max_new_tokens") is not None,
            return_logprob=value("return_logprob", flag),
            logprob_start_len=value("logprob_start_len", integer),
            top_logprobs_num=value("top_logprobs_num", integer),
            token_ids_logprob=value("token_ids_logprob", or_none(token_ids)),
            namespace=cache_namespace(value("extra_key", or_none(text)), value("cache_salt", or_none(text))),
            routed_dp_rank=value("routed_dp_rank", or_none(integer)),
        )


def cache_namespace(extra_key: str | None, cache_salt: str | None) -> str | None:
    """One name for the prefix cache out of both; as JSON, so that no two pairs give the same name."""
    if extra_key is None and cache_salt is None:
        return None
    return json.dumps([extra_key, cache_salt])


def _check_whole_request(obj: GenerateReqInput) -> None:
    """Fields that belong to the request as a whole and not to one of its prompts."""
    for name in ("stream", "return_text_in_logprobs", "return_prompt_token_ids", "no_logs"):
        flag(name, getattr(obj, name))
    if obj.priority is not None and (type(obj.priority) is not int or obj.priority != 0):
        raise refused("priority", REFUSED["priority"].reason)


def _batch_size(obj: GenerateReqInput) -> int | None:
    """How many prompts a batch has, None for a single prompt; cheap, whatever the size."""
    if not obj.is_batch:
        return None
    return len((obj.text if obj.text is not None else obj.input_ids) or ())


def _num_samples(obj: GenerateReqInput) -> int:
    sampling = obj.sampling_params
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    samples = first.get("n") if isinstance(first, Mapping) else None
    # What is no legal number is refused by name further on.
    return samples if type(samples) is int and 1 <= samples <= MAX_SAMPLES else 1


def _prompts(obj: GenerateReqInput, *, is_batch: bool) -> tuple[str, Sequence[object]]:
    """The name of the field that holds the prompts, and the prompts in it."""
    if (obj.text is None) == (obj.input_ids is None):
        given = "both" if obj.text is not None else "none"
        raise RequestRejected(f"exactly one of text and input_ids must be given, got {given}", param="text")
    name = "input_ids" if obj.text is None else "text"
    value: object = getattr(obj, name)
    if name == "text" and not isinstance(value, str | list):
        raise refused(name, f"must be a string or a list of strings, got {shown(value)}")
    if name == "input_ids" and not isinstance(value, list):
        raise refused(name, f"must be a list of token ids or a list of such lists, got {shown(value)}")
    if not is_batch or not isinstance(value, list):
        return name, [value]
    if not value:
        raise refused(name, "the prompt is empty; give at least one token")
    return name, value


def _rids(obj: GenerateReqInput, count: int | None) -> list[str]:
    if obj.rid is None:
        obj.rid = uuid.uuid4().hex
    if isinstance(obj.rid, str):
        if not obj.rid:
            raise refused("rid", "must not be empty; leave it out to get one")
        text("rid", obj.rid)
        return [obj.rid] if count is None else [f"{obj.rid}_{i}" for i in range(count)]
    if not isinstance(obj.rid, list) or not all(isinstance(rid, str) and rid for rid in obj.rid):
        raise refused("rid", f"must be a string, or a list of them for a batch, got {shown(obj.rid)}")
    if count is None:
        raise refused("rid", "a list of ids needs a batch of prompts")
    if len(obj.rid) != count:
        raise refused("rid", f"must have one entry for each of the {count} prompts, got {len(obj.rid)}")
    return [text("rid", rid) for rid in obj.rid]


def _value_of(obj: GenerateReqInput, name: str, i: int, count: int | None) -> object:
    """The value for prompt `i`: one value for all, or the i-th of a list of the batch's length."""
    value = getattr(obj, name)
    if not isinstance(value, list):
        return value
    if name == "token_ids_logprob" and not (value and (value[0] is None or isinstance(value[0], list))):
        return value  # a list even for one prompt
    if count is None:
        raise refused(name, "a list of values needs a batch of prompts")
    if len(value) != count:
        raise refused(name, f"must have one entry for each of the {count} prompts, got {len(value)}")
    return value[i]


def _refuse_lists_with_samples(obj: GenerateReqInput) -> None:
    """Refuse lists with n above 1: an entry would not say which of the samples it is for."""
    sampling = obj.sampling_params
    every = sampling if isinstance(sampling, list) else [sampling]
    given = [item.get("n") or 1 for item in every if isinstance(item, Mapping)]
    counts = {number for number in given if isinstance(number, int)}
    if len(counts) > 1:
        raise refused("n", f"must be the same for all prompts of a batch, got {sorted(counts)}")
    if counts - {1}:
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(getattr(obj, name), list):
                raise refused(name, "a list of values cannot be combined with n above 1")

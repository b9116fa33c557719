"""Owns the translation of a checked OpenAI body into the native request that the engine takes.

Read by both routes when they prepare a job. It must not check what the engine checks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sglang.srt.entrypoints.http.dp_rank_header import dp_rank_of_header
from sglang.srt.entrypoints.openai.protocol import SharedRequest, acting_fields
from sglang.srt.entrypoints.openai.serving_job import Job, Manager
from sglang.srt.messages.errors import refused
from sglang.srt.messages.generate_input import GenerateReqInput, SamplingMapping
from sglang.srt.messages.request_fields import shown

T = TypeVar("T")


def make_job(
    request: SharedRequest,
    headers: Mapping[str, str],
    manager: Manager,
    *,
    prompts: list[str] | list[list[int]],
    logprob_start_len: int = -1,
    default_max_tokens: Sequence[int | None] = (None,),
    end_ids: Sequence[int] = (),
) -> Job:
    """The part of `prepare` that both routes share: prompts, sampling, identity, placement.

    `default_max_tokens` holds for each prompt, or for all, the limit where the client names none. `end_ids`
    end the answer beside the client's `stop_token_ids`.
    """
    sampling = sampling_mapping(request)
    given = sampling.get("stop_token_ids", [])
    if end_ids and isinstance(given, list):  # anything else is refused further on
        sampling["stop_token_ids"] = [*given, *end_ids]
    limits = [sampling.get("max_new_tokens", default) for default in default_max_tokens]
    every: list[SamplingMapping] = [{**sampling, "max_new_tokens": limit} for limit in limits]
    count = len(prompts)
    rid = _per_prompt("rid", request.rid, count) or uuid.uuid4().hex
    stated_rank = dp_rank_of_header(headers)
    texts: list[str] = [prompt for prompt in prompts if isinstance(prompt, str)]
    id_lists: list[list[int]] = [prompt for prompt in prompts if not isinstance(prompt, str)]
    input_ids = _one_or_all(id_lists)
    native = GenerateReqInput(
        text=_one_or_all(texts),
        input_ids=input_ids,
        sampling_params=every[0] if all(limit == limits[0] for limit in limits) else every,
        rid=rid,
        stream=bool(request.stream),
        logprob_start_len=logprob_start_len,
        return_prompt_token_ids=bool(request.return_token_ids),
        extra_key=_per_prompt("extra_key", request.extra_key, count),
        cache_salt=_per_prompt("cache_salt", request.cache_salt, count),
        routed_dp_rank=request.routed_dp_rank if stated_rank is None else stated_rank,
    )
    return Job(
        request=request,
        native=native,
        id=rid if isinstance(rid, str) else rid[0],
        model=_model_name(request.model, manager.served_model_name),
        num_prompts=count,
        n=request.n or 1,
        prompts=prompts,
    )


def _per_prompt(name: str, value: str | list[str] | None, count: int) -> str | list[str] | None:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise refused(name, f"must have one entry for each of the {count} prompts, got {len(value)}")
    return _one_or_all(value)


def _one_or_all(values: list[T]) -> T | list[T] | None:
    """A native request has no batch of one: that would be answered by a list."""
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def _model_name(given: str | None, served: str) -> str:
    """Echoed, whatever it is; only `served:adapter` means an answer that this server cannot give."""
    if given is not None and given.startswith(served + ":"):
        raise refused(
            "model",
            f"{shown(given)} names an adapter of {served!r}, and adapters are not supported yet; "
            f"ask for {served!r}",
        )
    return given or served


def sampling_mapping(request: SharedRequest) -> dict[str, object]:
    """What the client gave of the sampling parameters, under `SamplingParams`' names.

    What was left out stays out, so that the model's generation defaults can fill it.
    """
    mapping: dict[str, object] = {}
    for name, field in acting_fields(request.route).items():
        value = getattr(request, name)
        if field.sampling is not None and value is not None and name != "max_tokens":
            mapping[field.sampling] = value
    if request.n is not None:
        mapping["n"] = request.n
    if request.max_completion_tokens is None and request.max_tokens is not None:
        mapping["max_new_tokens"] = request.max_tokens
    return mapping

"""Owns the way both OpenAI routes take: read, parse, prepare, generate, answer whole or as a stream, or
refuse.

Read by `router`. It must not know a dialect's fields; those are in `serving_chat` and `serving_completions`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http.dp_rank_header import dp_rank_of_header
from sglang.srt.entrypoints.http.errors import error_response, json_response, rejected_response
from sglang.srt.entrypoints.http.request_body import read_json
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, raise_if_failed
from sglang.srt.entrypoints.openai.protocol import (
    SharedRequest,
    in_client_words,
    parse_request,
    reject,
    sampling_mapping,
    shown,
)
from sglang.srt.entrypoints.openai.serving_job import Dialect, Job, Manager, ServingSettings
from sglang.srt.entrypoints.openai.streaming import open_stream, writing_the_answer
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput

logger = logging.getLogger(__name__)

#: Bytes above which a request is prepared on a thread.
LONG_BODY = 16_000


async def serve(request: Request, dialect: Dialect, manager: Manager, settings: ServingSettings) -> Response:
    """One POST, from its body to its answer."""
    parsed: SharedRequest | None = None
    try:
        parsed = parse_request(dialect.request_type, await read_json(request), dialect.unknown_fields.note)
        if manager.tokenizer is None:
            raise RequestRejected("the server runs with --skip-tokenizer-init; post input_ids to /generate")
        if len(await request.body()) > LONG_BODY:
            # Rendering and tokenizing a long chat takes a while, and other streams must go on meanwhile.
            job = await asyncio.to_thread(dialect.prepare, parsed, request.headers)
        else:
            job = dialect.prepare(parsed, request.headers)
        items = manager.generate_request(job.native, request.is_disconnected, incremental=job.native.stream)
        if parsed.stream:
            return await open_stream(job, dialect, settings, items)
        last: Any = None
        async for item in items:
            last = item
        with writing_the_answer():
            return json_response(whole_answer(job, dialect, settings, last))
    except (RequestRejected, ValueError) as error:
        # What `parse_request` refuses is in the client's words already.
        return rejected_response(error if parsed is None else in_client_words(error, parsed))
    except Exception:
        logger.exception("%s failed", request.url.path)
        return error_response("the server failed to answer this request", 500)


def whole_answer(job: Job, dialect: Dialect, settings: ServingSettings, last: Any) -> dict[str, Any]:
    """The answer in one piece from the engine's last word: one output, or a list in choice order."""
    outputs = last if isinstance(last, list) else [last]
    if last is None or len(outputs) != job.num_choices:
        raise RuntimeError(
            f"{job.id} expects {job.num_choices} outputs, the engine gave {last and len(outputs)}"
        )
    choices = []
    for index, output in enumerate(outputs):
        raise_if_failed(output)
        progress = ChoiceProgress(index, with_logprobs=job.with_logprobs)
        choices.append(dialect.choice(job, progress, progress.take(output)))
    metas = [output["meta_info"] for output in outputs]
    return {
        **job.envelope(dialect.answer_object),
        "choices": choices,
        "usage": usage_of(metas, samples_per_prompt=job.n, cache_report=settings.cache_report),
        "metadata": {"weight_version": metas[0].get("weight_version")},
    }


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
    """The part of `prepare` that both routes share: prompts, sampling, identity, placement. `end_ids` end
    the answer beside the client's `stop_token_ids`.
    """
    sampling = sampling_mapping(request)
    given = sampling.get("stop_token_ids", [])
    if end_ids and isinstance(given, list):  # anything else is refused further on
        sampling["stop_token_ids"] = [*given, *end_ids]
    # For each prompt what the limit is when the client names none.
    limits = [sampling.get("max_new_tokens", default) for default in default_max_tokens]
    every = [{**sampling, "max_new_tokens": limit} for limit in limits]
    count = len(prompts)
    rid = _per_prompt("rid", request.rid, count)
    if rid is None:
        rid = uuid.uuid4().hex
    alone: Any = prompts[0] if count == 1 else prompts
    is_text = isinstance(prompts[0], str)
    native = GenerateReqInput(
        text=alone if is_text else None,
        input_ids=None if is_text else alone,
        sampling_params=every[0] if all(limit == limits[0] for limit in limits) else every,
        rid=rid,
        stream=bool(request.stream),
        logprob_start_len=logprob_start_len,
        return_prompt_token_ids=bool(request.return_token_ids),
        extra_key=_per_prompt("extra_key", request.extra_key, count),
        cache_salt=_per_prompt("cache_salt", request.cache_salt, count),
        routed_dp_rank=_dp_rank(request, headers),
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
        raise reject(name, f"must have one entry for each of the {count} prompts, got {len(value)}")
    return value[0] if count == 1 else value


def _dp_rank(request: SharedRequest, headers: Mapping[str, str]) -> int | None:
    stated = dp_rank_of_header(headers)
    if stated is not None:
        return stated
    return request.routed_dp_rank


def _model_name(asked: str | None, served: str) -> str:
    """Echoed, whatever it is; only `served:adapter` asks for an answer that this server cannot give."""
    if asked is not None and asked != served and asked.startswith(served + ":"):
        raise reject(
            "model",
            f"{shown(asked)} names an adapter of {served!r}, and adapters are not supported yet; "
            f"ask for {served!r}",
        )
    return asked or served

"""Owns the way both OpenAI routes take: read, parse, prepare, generate, and answer or refuse.

Read by `router`. It must not know a dialect's fields; those are in `serving_chat` and `serving_completions`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http.errors import error_response, json_response, rejected_response
from sglang.srt.entrypoints.http.request_body import read_json
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, raise_if_failed
from sglang.srt.entrypoints.openai.protocol import SharedRequest, in_client_words, parse_request
from sglang.srt.entrypoints.openai.serving_job import Dialect, Job, Manager, ServingSettings, tokenizer_of
from sglang.srt.entrypoints.openai.streaming import open_stream, writing_the_answer
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_output import NativeAnswer

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=SharedRequest)

#: Bytes above which a request is prepared on a thread.
LONG_BODY = 16_000


async def serve(
    request: Request, dialect: Dialect[RequestT], manager: Manager, settings: ServingSettings
) -> Response:
    """One POST, from its body to its answer."""
    parsed: RequestT | None = None
    try:
        parsed = parse_request(dialect.request_type, await read_json(request), dialect.unknown_fields.note)
        tokenizer_of(manager)  # before anything is made of the body
        if len(await request.body()) > LONG_BODY:
            # Rendering and tokenizing a long chat takes a while, and other streams must go on meanwhile.
            job = await asyncio.to_thread(dialect.prepare, parsed, request.headers)
        else:
            job = dialect.prepare(parsed, request.headers)
        items = manager.generate_request(job.native, request.is_disconnected, incremental=job.native.stream)
        if parsed.stream:
            return await open_stream(job, dialect, settings, items)
        last: NativeAnswer | None = None
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


def whole_answer(
    job: Job, dialect: Dialect[RequestT], settings: ServingSettings, last: NativeAnswer | None
) -> dict[str, object]:
    """The answer in one piece from the engine's last item: one output, or a list in choice order."""
    outputs = last if isinstance(last, list) else [] if last is None else [last]
    if len(outputs) != job.num_choices:
        raise RuntimeError(f"{job.id} expects {job.num_choices} outputs, the engine gave {len(outputs)}")
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
        "metadata": {"weight_version": metas[0]["weight_version"]},
    }

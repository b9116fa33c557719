"""Owns the order of an OpenAI stream: chunks as they come, usage last where it is wanted.

Read by `serving_base`, for both routes. It must not send a status line before the first output is there: what
is known to be wrong by then is an HTTP error.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

from sglang.srt.entrypoints.http.errors import error_body
from sglang.srt.entrypoints.http.sse import EventSource, EventStream
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, raise_if_failed
from sglang.srt.entrypoints.openai.protocol import SharedRequest, in_client_words
from sglang.srt.entrypoints.openai.serving_job import Dialect, Job, ServingSettings
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_output import NativeAnswer, NativeOutput

RequestT = TypeVar("RequestT", bound=SharedRequest)


async def open_stream(
    job: Job, dialect: Dialect[RequestT], settings: ServingSettings, items: AsyncGenerator[NativeAnswer, None]
) -> EventStream:
    """Wait for the first output (its refusal is a real HTTP status), then answer with the stream."""
    writer = ChunkWriter(job, dialect, settings)
    source = EventSource(items, writer.write, writer.finish)
    await source.begin()
    return EventStream(source, on_error=lambda error: _error_event(error, job))


def _error_event(error: Exception, job: Job) -> dict[str, object]:
    """The one error event of a stream; clients raise at the key `error`."""
    if isinstance(error, RequestRejected | ValueError):
        rejected = in_client_words(error, job.request)
    else:
        rejected = RequestRejected(
            "the server failed to finish this answer", 500, None, "InternalServerError"
        )
    body = error_body(rejected.message, rejected.err_type, rejected.status_code, rejected.param)
    return {"error": {"object": "error", **body["error"]}}


@contextlib.contextmanager
def writing_the_answer() -> Iterator[None]:
    """Once the engine has answered, a ValueError is no mistake of the client's."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"the answer could not be written: {error}") from error


class ChunkWriter:
    """Turns native outputs of all choices into chunks. Choices come interleaved, each in its own order."""

    def __init__(self, job: Job, dialect: Dialect[RequestT], settings: ServingSettings) -> None:
        self._job = job
        self._stream_choices = dialect.stream_choices
        self._chunk_object = dialect.chunk_object
        self._cache_report = settings.cache_report
        options = job.request.stream_options
        stated = options.include_usage if options is not None else None
        self._include_usage = settings.include_usage_by_default if stated is None else stated
        self._continuous = options is not None and options.continuous_usage_stats
        self._choices: list[ChoiceProgress] = []

    def write(self, item: NativeAnswer) -> list[dict[str, object]]:
        """The chunks of one native item, which for a batch may be a list of outputs."""
        if not self._choices:
            # Only now: how many there are is within its limit once the engine has taken the request.
            self._choices = [
                ChoiceProgress(i, with_logprobs=self._job.with_logprobs) for i in range(self._job.num_choices)
            ]
        with writing_the_answer():
            outputs = item if isinstance(item, list) else [item]
            return [chunk for output in outputs for chunk in self._chunks(output)]

    def _chunks(self, output: NativeOutput) -> Iterator[dict[str, object]]:
        raise_if_failed(output)
        progress = self._choices[output.get("index", 0)]
        if progress.finished:
            raise RuntimeError(f"choice {progress.index} of {self._job.id} went on after its end")
        update = progress.take(output)
        for choice in self._stream_choices(self._job, progress, update):
            yield self._chunk(choice, progress)

    def finish(self) -> Iterator[dict[str, object]]:
        """After the last output: usage over all choices, where it is wanted."""
        metas = [
            progress.meta for progress in self._choices if progress.meta is not None and progress.finished
        ]
        if len(metas) < self._job.num_choices:
            raise RuntimeError(f"{self._job.num_choices - len(metas)} choices of {self._job.id} never ended")
        if self._include_usage:
            usage = usage_of(metas, samples_per_prompt=self._job.n, cache_report=self._cache_report)
            yield {**self._job.envelope(self._chunk_object), "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, object], progress: ChoiceProgress) -> dict[str, object]:
        chunk = {**self._job.envelope(self._chunk_object), "choices": [choice]}
        if self._continuous and progress.meta is not None:
            chunk["usage"] = usage_of([progress.meta], cache_report=self._cache_report)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

"""Owns the order of an OpenAI stream: chunks as they come, usage last if asked.

Read by `serving_base`, for both routes. It must not send a status line before the first output is there: what
is known to be wrong by then is an HTTP error.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sglang.srt.entrypoints.http.errors import error_body
from sglang.srt.entrypoints.http.sse import EventStream, first_then
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, raise_if_failed
from sglang.srt.entrypoints.openai.protocol import in_client_words
from sglang.srt.entrypoints.openai.serving_job import Dialect, Job, ServingSettings
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.messages.errors import RequestRejected


async def open_stream(
    job: Job, dialect: Dialect, settings: ServingSettings, items: AsyncIterator[Any]
) -> EventStream:
    """Wait for the first output (its refusal is a real HTTP status), then answer with the stream."""
    _, outputs = await first_then(items)
    # Only now: `n` is within its limit once the engine has taken the request.
    source = _Chunks(ChunkWriter(job, dialect, settings), outputs)
    try:
        await source.begin()
    except BaseException:
        await source.aclose()
        raise
    return EventStream(source, on_error=lambda error: _error_event(error, job))


def _error_event(error: Exception, job: Job) -> dict[str, Any]:
    """The one error event of a stream; clients raise at the key `error`."""
    if isinstance(error, RequestRejected | ValueError):
        told = in_client_words(error, job.request)
    else:
        told = RequestRejected("the server failed to finish this answer", 500, None, "InternalServerError")
    body = error_body(told.message, told.err_type, told.status_code, told.param)
    return {"error": {"object": "error", **body["error"]}}


@contextlib.contextmanager
def writing_the_answer() -> Iterator[None]:
    """Once the engine has answered, a ValueError is no mistake of the client's."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"the answer could not be written: {error}") from error


class _Chunks:
    """The chunks of a stream; closing it closes the engine's outputs, which aborts what still runs."""

    def __init__(self, writer: ChunkWriter, outputs: AsyncIterator[Any]) -> None:
        self._writer = writer
        self._outputs = outputs
        self._ready: list[dict[str, Any]] = []
        self._ended = False

    async def begin(self) -> None:
        """Work on the first output now, while a refusal can still be a status."""
        await self._more()

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            await self._more()
        return self._ready.pop(0)

    async def _more(self) -> None:
        try:
            item = await anext(self._outputs)
        except StopAsyncIteration:
            self._ended = True
            self._ready.extend(self._writer.close())
        else:
            with writing_the_answer():
                self._ready.extend(self._writer.write(item))

    async def aclose(self) -> None:
        close = getattr(self._outputs, "aclose", None)
        if close is not None:
            await close()


def _outputs_of(item: Any) -> list[dict[str, Any]]:
    """A native item as a list: a stream yields single outputs or, for a batch, a list of them."""
    return item if isinstance(item, list) else [item]


class ChunkWriter:
    """Turns native outputs of all choices into chunks. Choices come interleaved, each in its own order."""

    def __init__(self, job: Job, dialect: Dialect, settings: ServingSettings) -> None:
        self._job = job
        self._dialect = dialect
        self._cache_report = settings.cache_report
        options = job.request.stream_options
        asked = options.include_usage if options is not None else None
        self._include_usage = settings.include_usage_by_default if asked is None else asked
        self._continuous = options is not None and options.continuous_usage_stats
        self._choices = [ChoiceProgress(i, with_logprobs=job.with_logprobs) for i in range(job.num_choices)]

    def write(self, item: Any) -> Iterator[dict[str, Any]]:
        """The chunks of one native item."""
        for output in _outputs_of(item):
            raise_if_failed(output)
            progress = self._choices[output.get("index") or 0]
            if progress.finished:
                raise RuntimeError(f"choice {progress.index} of {self._job.id} went on after its end")
            news = progress.take(output)
            for choice in self._dialect.stream_choices(self._job, progress, news):
                yield self._chunk([choice], progress)

    def close(self) -> Iterator[dict[str, Any]]:
        """After the last output: usage over all choices, if asked for."""
        unfinished = [progress.index for progress in self._choices if not progress.finished]
        if unfinished:
            raise RuntimeError(f"choices {unfinished} of {self._job.id} never ended")
        if self._include_usage:
            chunk = self._job.envelope(self._dialect.chunk_object)
            metas = [progress.meta for progress in self._choices]
            usage = usage_of(metas, samples_per_prompt=self._job.n, cache_report=self._cache_report)
            yield {**chunk, "choices": [], "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]], progress: ChoiceProgress) -> dict[str, Any]:
        chunk = {**self._job.envelope(self._dialect.chunk_object), "choices": choices}
        if self._continuous:
            chunk["usage"] = usage_of([progress.meta], cache_report=self._cache_report)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

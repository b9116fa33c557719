"""Owns `sgl.Engine`: the same engine without HTTP, inside the user's own process.

Used by scripts and notebooks, with or without an event loop of their own. It installs no signal handler,
never ends the user's process, needs no `__main__` guard, and raises with the cause once a rank has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from sglang.srt.entrypoints.engine_core import EngineCore, resolve_and_check
from sglang.srt.entrypoints.http.information import model_information, server_information
from sglang.srt.entrypoints.native.generate_fields import parse_generate
from sglang.srt.entrypoints.process_start import fill_closed_streams
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import Report
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import SamplingMapping
from sglang.srt.messages.generate_output import NativeAnswer
from sglang.srt.processes.rank_processes import RANK_MODULE
from sglang.srt.runtime_context import get_serving
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log_format import configure_logging

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fields = dict[str, object]
Sampling = SamplingMapping | list[SamplingMapping]

#: Held while an engine starts: it publishes its settings for the whole process and reads them until it is
#: connected, so two starts on two threads must not mix.
_STARTING = threading.Lock()


class Engine:
    """`Engine(model_path=..., **flags)` takes the server's flags as keywords.

    `Engine(server_args=record)` takes a record instead. Use it as a context manager, or call `shutdown`;
    leaving the interpreter does it too.
    """

    def __init__(self, **settings: Any) -> None:
        record = settings.pop("server_args", None)
        rank_module = settings.pop("_rank_module", RANK_MODULE)
        if record is None:
            record = ServerArgs.from_kwargs(**{"log_level": "error", **settings})
        elif settings:
            raise ValueError(f"server_args stands alone; also given: {', '.join(sorted(settings))}")
        fill_closed_streams(log_to_output=False)
        configure_logging(record.log_level, logger_name="sglang")
        resolve_and_check(record)
        if record.node_rank > 0:
            raise ValueError(
                f"node_rank={record.node_rank}: an Engine stands on machine 0; run `sglang serve` with the "
                "same settings on the others, which only run ranks"
            )
        self.server_args: ServerArgs = record
        with _STARTING:
            self._runtime = _Runtime(record, rank_module)
        # Runs at the latest when the interpreter leaves; holds no reference to this object.
        self._finalizer = weakref.finalize(self, self._runtime.stop)
        self.tokenizer_manager: TokenizerManager = self._runtime.manager

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the ranks and free everything; safe to call twice."""
        self._finalizer()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: object,
    ) -> NativeAnswer | Iterator[NativeAnswer]:
        """One dict for one prompt, a list for a batch or n > 1; with `stream` an iterator of dicts.

        `fields` are the other keys of `/generate` (`return_logprob`, `rid`, `cache_salt`, ...). `ValueError`
        says what is wrong with the call, `RuntimeError` that it failed.
        """
        request = _fields(prompt, sampling_params, input_ids, stream) | fields
        if stream:
            return self._iterate(request)
        return self._runtime.run(self._runtime.generate_whole(request))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: object,
    ) -> NativeAnswer | AsyncIterator[NativeAnswer]:
        """The same on the caller's event loop; with `stream` the awaited value is an async iterator."""
        request = _fields(prompt, sampling_params, input_ids, stream) | fields
        if stream:
            return self._aiterate(request)
        return await self._runtime.run_async(self._runtime.generate_whole(request))

    def _iterate(self, request: Fields) -> Iterator[NativeAnswer]:
        items = self._runtime.generate_stream(request)
        try:
            while (item := self._runtime.run(_next_or_none(items))) is not None:
                yield item
        finally:
            self._runtime.close_stream(items)

    async def _aiterate(self, request: Fields) -> AsyncIterator[NativeAnswer]:
        items = self._runtime.generate_stream(request)
        try:
            while (item := await self._runtime.run_async(_next_or_none(items))) is not None:
                yield item
        finally:
            self._runtime.close_stream(items)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort by prefix of the rid, or all; an empty rid aborts nothing."""
        manager = self.tokenizer_manager

        async def abort() -> None:
            manager.abort_request(rid, abort_all)

        self._runtime.run(abort())

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Drop the prefix cache; False when requests are running."""
        return self._runtime.run(self.tokenizer_manager.flush_cache(timeout_s)).success

    def get_server_info(self) -> dict[str, object]:
        """Resolved configuration without secrets, and the counters of the schedulers."""
        return self._runtime.run(
            server_information(self._runtime.core, self.tokenizer_manager, self.server_args)
        )

    def placement(self) -> dict[str, list[Report]]:
        """The answer of `/placement`: every rank, every parallel name, its value and the layer it is from."""
        return self._runtime.run(self.tokenizer_manager.get_placement())

    def get_model_info(self) -> dict[str, object]:
        """The answer of `/model_info`."""
        return model_information(self.tokenizer_manager, self.server_args)

    def get_all_child_pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._runtime.core.ranks.pids


class _Runtime:
    """The engine's own event loop on its own thread: it runs beside whatever the user's thread does."""

    def __init__(self, record: ServerArgs, rank_module: str) -> None:
        self.core = EngineCore(record, role="engine", rank_module=rank_module)
        self._incremental = get_serving().incremental_streaming_output
        self._stopped: str | None = None
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-engine", daemon=True)
        self._thread.start()
        try:
            self.manager = self.run(self.core.connect())
        except BaseException:
            self.stop()
            raise

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Do `work` on the engine's loop and wait for it, from any other thread."""
        why = self._why_unusable()
        if threading.current_thread() is self._thread:
            why = "called on the engine's own thread, which would wait for itself; call from another one"
        if why:
            work.close()
            raise RuntimeError(why)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except RequestRejected as error:
            raise _for_python(error) from error
        except BaseException:
            # Ctrl-C while waiting: the request must not go on without a reader.
            future.cancel()
            raise

    async def run_async(self, work: Coroutine[object, object, T]) -> T:
        """The same without blocking the caller's event loop; cancelling the caller cancels the work."""
        if why := self._why_unusable():
            work.close()
            raise RuntimeError(why)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except RequestRejected as error:
            raise _for_python(error) from error

    def _why_unusable(self) -> str | None:
        if os.getpid() != self._pid:
            return (
                f"this engine belongs to process {self._pid}, and a fork of it has no event loop of it; "
                "start an Engine in the new process"
            )
        return self._stopped

    async def generate_whole(self, fields: Fields) -> NativeAnswer:
        """One answer, on the engine's loop."""
        async with contextlib.aclosing(self.manager.generate_request(parse_generate(fields))) as items:
            return await anext(items)

    async def generate_stream(self, fields: Fields) -> AsyncGenerator[NativeAnswer, None]:
        """The outputs of a stream, on the engine's loop."""
        items = self.manager.generate_request(parse_generate(fields), incremental=self._incremental)
        async with contextlib.aclosing(items):
            async for item in items:
                yield item

    def close_stream(self, items: AsyncGenerator[NativeAnswer, None]) -> None:
        """Abort what a reader leaves behind; does not wait."""
        if self._why_unusable() is None:
            asyncio.run_coroutine_threadsafe(items.aclose(), self._loop)

    def stop(self) -> None:
        """End everything; no executor is used, because at interpreter exit none takes work any more."""
        if self._why_unusable():
            return
        if threading.current_thread() is self._thread:
            # The garbage collector ran here and found a forgotten Engine.
            threading.Thread(target=self.stop, name="sglang-engine-stop").start()
            return
        self._stopped = self.core.cause_of_death or "the engine was shut down"
        asyncio.run_coroutine_threadsafe(self.core.begin_close(), self._loop).result()
        self.core.stop_ranks()
        asyncio.run_coroutine_threadsafe(self.core.finish_close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _fields(prompt: object, sampling_params: object, input_ids: object, stream: bool) -> Fields:
    return {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}


def _for_python(error: RequestRejected) -> Exception:
    """A mistake of the caller is a `ValueError`, everything else a `RuntimeError`."""
    return ValueError(error.message) if 400 <= error.status_code < 500 else RuntimeError(error.message)


async def _next_or_none(items: AsyncGenerator[NativeAnswer, None]) -> NativeAnswer | None:
    return await anext(items, None)

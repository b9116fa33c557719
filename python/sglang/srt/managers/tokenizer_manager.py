"""Owns every request between a door and the scheduler: prepare, send, collect, hand out.

Used by the HTTP routes and the Engine on one event loop. Nothing of a request is sent before all of it is
checked. It must not know about HTTP, and it never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_components.answer import AnswerBuilder
from sglang.srt.managers.tokenizer_components.control import ControlCalls, merged_flush, merged_placement
from sglang.srt.managers.tokenizer_components.logger import RequestLogger
from sglang.srt.managers.tokenizer_components.preparation import RequestPreparer, published_limits
from sglang.srt.managers.tokenizer_components.state import CallState, SampleState
from sglang.srt.messages import io_struct
from sglang.srt.messages.channel import Channel
from sglang.srt.messages.control import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    GetPlacementReq,
    GetPlacementReqOutput,
    Report,
)
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.generate_output import NativeAnswer
from sglang.srt.runtime_context import get_observability, get_serving
from sglang.srt.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IsDisconnected = Callable[[], Awaitable[bool]]


class TokenizerManager:
    """All requests in flight of one engine.

    `start` must be called on the event loop that then serves the calls. `channel` leads to the schedulers, or
    to the controller in front of several replicas.
    """

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        channel: Channel,
        rank_info: Report,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        # Kept, not read anew: a second Engine in this process publishes its own.
        self._serving = get_serving()
        observability = get_observability()
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.rank_info = rank_info
        self.served_model_name = cast(str, self._serving.served_model_name)  # resolution gave it a name
        self.limits = published_limits(model_config, rank_info, has_tokenizer=tokenizer is not None)
        self._detokenizer = DetokenizerManager(tokenizer)
        self._preparer = RequestPreparer(
            tokenizer=tokenizer, limits=self.limits, check_room=self._detokenizer.check_room
        )
        self._channel = channel
        self._on_broken = on_broken
        self._samples: dict[str, SampleState] = {}
        #: Aborted by us and not yet confirmed: a new request with such a rid would get the confirmation.
        self._leaving: set[str] = set()
        self._calls: set[CallState] = set()
        self._control = ControlCalls(channel.send, self.limits.replicas)
        self._closed_because: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log = RequestLogger(
            enabled=observability.log_requests,
            level=observability.log_requests_level,
            as_json=observability.log_requests_format == "json",
        )

    def start(self) -> None:
        """Begin to receive, on the running loop."""
        self._tasks = [
            asyncio.create_task(self._receive(), name="tokenizer-manager-receive"),
            asyncio.create_task(self._check_clients(), name="tokenizer-manager-clients"),
        ]

    async def stop(self) -> None:
        """End the tasks; calls still open fail."""
        self.fail_all("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_accepting(self, why: str) -> None:
        """New calls are answered 503 from now on; those under way go on."""
        self._closed_because = self._closed_because or why

    def fail_all(self, cause: str) -> None:
        """The ranks are gone: every open and every later call fails with the cause."""
        self._closed_because = cause
        for call in list(self._calls):
            call.fail(RequestRejected(cause, status_code=500, err_type="InternalServerError"))
        self._control.fail_all(cause)

    @property
    def num_open(self) -> int:
        """The number of calls under way."""
        return len(self._calls)

    async def generate_request(
        self,
        obj: GenerateReqInput,
        is_disconnected: IsDisconnected | None = None,
        *,
        incremental: bool = False,
    ) -> AsyncGenerator[NativeAnswer, None]:
        """Native answers: with `stream` one output after another, else one answer for the whole request.

        The outputs of a stream are cumulative unless `incremental`. Raises `RequestRejected` before anything
        is sent, and later when the scheduler fails the request. However it ends, nothing of it goes on
        running.
        """
        self._refuse_when_closed()
        messages = await self._preparer.messages(obj)
        self._refuse_when_closed()
        call = self._open(messages)
        try:
            self._log.received(obj)
            builder = AnswerBuilder(
                weight_version=self._serving.weight_version,
                return_prompt_token_ids=obj.return_prompt_token_ids,
                token_text=self._detokenizer.token_text if obj.return_text_in_logprobs else None,
                incremental=incremental,
            )
            is_list = obj.is_batch or len(call.samples) > 1
            if obj.stream:
                async for sample in self._updates(call, is_disconnected):
                    yield builder.answer(sample, with_index=is_list)
                self._log.finished(obj, call)
            else:
                async for _ in self._updates(call, is_disconnected):
                    pass
                answers = [builder.answer(sample, with_index=False) for sample in call.samples]
                self._log.finished(obj, call)
                yield answers if is_list else answers[0]
        except RequestRejected:
            raise
        except Exception as error:
            logger.exception("the answer to %s could not be made", obj.rid)
            raise _lost_answer(error) from error
        finally:
            self._close(call)

    def _refuse_when_closed(self) -> None:
        if self._closed_because is not None:
            raise RequestRejected(self._closed_because, status_code=503, err_type="ServiceUnavailableError")

    def _open(self, messages: list[io_struct.TokenizedGenerateReqInput]) -> CallState:
        """Register and send, in one go: no other call can take the same rids in between."""
        seen: set[str] = set()
        for message in messages:
            if message.rid in self._samples or message.rid in self._leaving or message.rid in seen:
                raise refused("rid", f"{message.rid!r} is in use by a request in flight; choose another")
            seen.add(message.rid)
        self._detokenizer.check_room(len(messages))
        call = CallState()
        self._calls.add(call)
        for index, message in enumerate(messages):
            sample = SampleState(call, message, index)
            call.samples.append(sample)
            self._samples[message.rid] = sample
        sent = 0
        try:
            for message in messages:
                self._detokenizer.register(message.rid, message.input_ids, message.sampling_params)
            for message in messages:
                self._channel.send(message)
                sent += 1
        except Exception as error:
            # Nothing of a call that cannot be sent whole may stay.
            for unsent in call.samples[sent:]:
                del self._samples[unsent.rid]
                self._detokenizer.drop(unsent.rid)
            self._close(call)
            logger.exception("%s could not be sent", call.samples[0].rid)
            raise _lost_answer(error) from error
        return call

    async def _updates(
        self, call: CallState, is_disconnected: IsDisconnected | None
    ) -> AsyncGenerator[SampleState, None]:
        """Samples that have something new, until all have ended."""
        while True:
            await call.wakeup.wait()
            call.wakeup.clear()
            if call.error is not None:
                raise call.error
            if call.check_client:
                call.check_client = False
                if is_disconnected is not None and await is_disconnected():
                    logger.debug("the client of %s hung up", call.samples[0].rid)
                    raise RequestRejected("the client closed the connection", status_code=499)
            while call.updated:
                sample = call.updated.popleft()
                sample.is_queued = False
                yield sample
            if call.finished and not call.updated:
                return

    def _close(self, call: CallState) -> None:
        """Forget a call; what of it still runs is aborted, each sequence by its own name."""
        self._calls.discard(call)
        for sample in call.samples:
            if not sample.finished and self._samples.pop(sample.rid, None) is not None:
                self._detokenizer.drop(sample.rid)
                self._leaving.add(sample.rid)
                self._channel.send(io_struct.AbortReq(rid=sample.rid, exact=True))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort by prefix of the rid, or all; an empty rid aborts nothing. What is aborted still answers."""
        if abort_all or rid:
            self._channel.send(io_struct.AbortReq(rid=rid, abort_all=abort_all))

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """Drop the prefix cache of every replica, waiting `timeout_s` for running requests to end."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            answers = await self._control.call(FlushCacheReqInput, FlushCacheReqOutput)
            answer = merged_flush(answers)
            if answer.success or asyncio.get_running_loop().time() >= deadline:
                return answer
            await asyncio.sleep(0.05)

    async def get_internal_state(self) -> list[Report]:
        """The schedulers' counters, one entry per replica."""
        answers = await self._control.call(GetInternalStateReq, GetInternalStateReqOutput)
        return [answer.state for answer in answers]

    async def get_placement(self) -> dict[str, list[Report]]:
        """The live parallel context of every rank, and what was written to it after publish."""
        answers = await self._control.call(GetPlacementReq, GetPlacementReqOutput)
        return merged_placement(answers)

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(await self._channel.recv())
        except Exception as error:
            cause = f"a message of the scheduler could not be handled: {type(error).__name__}: {error}"
            logger.exception(cause)
            self.fail_all(cause)
            if self._on_broken is not None:
                self._on_broken(cause)

    def _handle(self, message: io_struct.Message) -> None:
        match message:
            case io_struct.BatchTokenIDOutput():
                for output in message.outputs:
                    self._take(output, message.dp_rank)
            case FlushCacheReqOutput() | GetInternalStateReqOutput() | GetPlacementReqOutput():
                self._control.answer(message)
            case _:
                raise RuntimeError(f"a {type(message).__name__} is not meant for the tokenizer manager")

    def _take(self, output: io_struct.TokenOutput, dp_rank: int) -> None:
        reason = output.finish_reason
        sample = self._samples.get(output.rid)
        if sample is None:
            if reason is not None:
                self._leaving.discard(output.rid)
            return
        try:
            sample.take(output, self._detokenizer.process(output), dp_rank)
        except Exception as error:
            # Only this answer is lost: the loop serves all requests.
            logger.exception("no text could be made of the tokens of %s", output.rid)
            sample.call.fail(_lost_answer(error))
            self._detokenizer.drop(output.rid)
        if reason is not None:
            del self._samples[output.rid]
            self._detokenizer.drop(output.rid)
            if reason.type == "abort" and reason.status_code is not None:
                sample.call.fail(
                    RequestRejected(
                        reason.message or "the request failed",
                        status_code=reason.status_code,
                        err_type=reason.err_type or "BadRequestError",
                    )
                )
        sample.call.notify(sample)

    async def _check_clients(self) -> None:
        """Wake every call now and then, so that one whose client has gone does not run to its end."""
        while True:
            await asyncio.sleep(envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.get())
            for call in self._calls:
                call.check_client = True
                call.wakeup.set()


def _lost_answer(error: Exception) -> RequestRejected:
    """What the client gets in place of an answer that the server itself failed to make."""
    return RequestRejected(
        f"the server failed to make this answer ({type(error).__name__}); its log says more",
        status_code=500,
        err_type="InternalServerError",
    )

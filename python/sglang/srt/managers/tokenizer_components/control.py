"""Owns the calls that schedulers answer: flush the cache, read the counters, show the placement.

Used by the tokenizer manager. Each call has a number that its answers carry back, one for each replica. It
must not touch requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from sglang.srt.messages import io_struct
from sglang.srt.messages.control import Report
from sglang.srt.messages.errors import RequestRejected

#: A scheduler answers between two steps, so this bounds one step; a stuck one is found by the watchdog.
ANSWER_TIMEOUT_S = 60.0

AnswerT = TypeVar(
    "AnswerT",
    io_struct.FlushCacheReqOutput,
    io_struct.GetInternalStateReqOutput,
    io_struct.GetPlacementReqOutput,
)


class _OpenCall:
    """One call under way: the answers so far by replica, and the future that ends with the last."""

    def __init__(self) -> None:
        self.answers: dict[int, io_struct.AnswerToCall] = {}
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ControlCalls:
    """The calls under way, by number. A call goes to every replica and ends with the last answer."""

    def __init__(self, send: Callable[[io_struct.Message], None], replicas: int = 1) -> None:
        self._send = send
        self._replicas = replicas
        self._numbers = itertools.count()
        self._open: dict[int, _OpenCall] = {}
        self._failed: str | None = None

    async def call(
        self, message_type: Callable[..., io_struct.Message], answer_type: type[AnswerT]
    ) -> list[AnswerT]:
        """Send a message of this type and wait for the answers to it, in the order of the replicas."""
        if self._failed is not None:
            raise RequestRejected(self._failed, status_code=503)
        number = next(self._numbers)
        call = self._open[number] = _OpenCall()
        try:
            self._send(message_type(call_id=number))
            await asyncio.wait_for(call.future, ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise RequestRejected(self._why_no_answer(call), status_code=503) from error
        finally:
            del self._open[number]
        in_order = [call.answers[replica] for replica in sorted(call.answers)]
        answers = [answer for answer in in_order if isinstance(answer, answer_type)]
        assert len(answers) == len(in_order), "an answer to another kind of call"
        return answers

    def answer(self, message: io_struct.AnswerToCall) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        call = self._open.get(message.call_id)
        if call is None or call.future.done():
            return
        if message.dp_rank in call.answers:
            raise RuntimeError(f"replica {message.dp_rank} answered call {message.call_id} twice")
        call.answers[message.dp_rank] = message
        if len(call.answers) == self._replicas:
            call.future.set_result(None)

    def fail_all(self, cause: str) -> None:
        """Fail the open calls and all later ones: no answer will come any more."""
        self._failed = cause
        for call in self._open.values():
            if not call.future.done():
                call.future.set_exception(
                    RequestRejected(cause, status_code=500, err_type="InternalServerError")
                )

    def _why_no_answer(self, call: _OpenCall) -> str:
        if self._replicas == 1:
            return f"the scheduler did not answer within {ANSWER_TIMEOUT_S:.0f} s"
        silent = [str(replica) for replica in range(self._replicas) if replica not in call.answers]
        return f"no answer within {ANSWER_TIMEOUT_S:.0f} s from replica {', '.join(silent)}"


def merged_flush(answers: Sequence[io_struct.FlushCacheReqOutput]) -> io_struct.FlushCacheReqOutput:
    """Flushed means flushed everywhere; the message says which replica refused, and why."""
    if len(answers) == 1:
        return answers[0]
    refused = [answer for answer in answers if not answer.success]
    if not refused:
        return io_struct.FlushCacheReqOutput(call_id=answers[0].call_id, success=True)
    return io_struct.FlushCacheReqOutput(
        call_id=answers[0].call_id,
        success=False,
        message="; ".join(
            f"replica {answer.dp_rank}: {answer.message or 'not flushed'}" for answer in refused
        ),
    )


def merged_placement(answers: Sequence[io_struct.GetPlacementReqOutput]) -> dict[str, list[Report]]:
    """`{"ranks", "overrides"}` of all replicas, each in the order of replica and world rank."""

    def seat(entry: Report) -> tuple[int, int]:
        return entry["dp_rank"], entry["world_rank"]

    return {
        "ranks": sorted((rank for answer in answers for rank in answer.ranks), key=seat),
        # Stable: the writes of one rank stay in the order in which they happened.
        "overrides": sorted((entry for answer in answers for entry in answer.overrides), key=seat),
    }

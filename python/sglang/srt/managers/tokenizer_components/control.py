"""Owns the calls that ask the schedulers something and wait for their answers: flush the cache, read the
counters, show the placement.

Used by the tokenizer manager. Each call has a number that its answers carry back, one for each replica. It
must not touch requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected

#: A scheduler answers between two steps, so this bounds one step; a stuck one is the watchdog's business.
ANSWER_TIMEOUT_S = 60.0

Answer = io_struct.FlushCacheReqOutput | io_struct.GetInternalStateReqOutput | io_struct.GetPlacementReqOutput


class _Question:
    """One call under way: who has answered, and the future of all answers."""

    def __init__(self) -> None:
        self.answers: dict[int, Any] = {}
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ControlCalls:
    """Questions under way, by number. A question goes to every replica and ends with the last answer."""

    def __init__(self, send: Callable[[io_struct.Message], None], replicas: int = 1) -> None:
        self._send = send
        self._replicas = replicas
        self._numbers = itertools.count()
        self._waiting: dict[int, _Question] = {}
        self._failed: str | None = None

    async def ask(self, build: Callable[[int], io_struct.Message]) -> list[Any]:
        """Send `build(number)` and wait for the answers to that number, in the order of the replicas."""
        if self._failed is not None:
            raise RequestRejected(self._failed, status_code=503)
        number = next(self._numbers)
        question = self._waiting[number] = _Question()
        try:
            self._send(build(number))
            await asyncio.wait_for(question.future, ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise RequestRejected(self._silence(question), status_code=503) from error
        finally:
            del self._waiting[number]
        return [answer for _, answer in sorted(question.answers.items())]

    def answer(self, message: Answer) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        question = self._waiting.get(message.call_id)
        if question is None or question.future.done():
            return
        if message.dp_rank in question.answers:
            raise RuntimeError(f"replica {message.dp_rank} answered call {message.call_id} twice")
        question.answers[message.dp_rank] = message
        if len(question.answers) == self._replicas:
            question.future.set_result(None)

    def fail_all(self, cause: str) -> None:
        """No answer will come any more."""
        self._failed = cause
        for question in self._waiting.values():
            if not question.future.done():
                question.future.set_exception(
                    RequestRejected(cause, status_code=500, err_type="InternalServerError")
                )

    def _silence(self, question: _Question) -> str:
        if self._replicas == 1:
            return f"the scheduler did not answer within {ANSWER_TIMEOUT_S:.0f} s"
        silent = [str(replica) for replica in range(self._replicas) if replica not in question.answers]
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


def merged_placement(answers: Sequence[io_struct.GetPlacementReqOutput]) -> dict[str, list[dict[str, Any]]]:
    """`{"ranks", "overrides"}` of all replicas, each in the order of replica and world rank."""

    def seat(entry: dict[str, Any]) -> tuple[int, int]:
        return entry["dp_rank"], entry["world_rank"]

    return {
        "ranks": sorted((rank for answer in answers for rank in answer.ranks), key=seat),
        # Stable: the writes of one rank stay in the order in which they happened.
        "overrides": sorted((entry for answer in answers for entry in answer.overrides), key=seat),
    }

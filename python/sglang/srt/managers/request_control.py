"""Owns the calls that ask the scheduler something and wait for its answer: flush the cache, read the
counters.

Used by the tokenizer manager. Each call has a number that its answer carries back. It must not touch
requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected

#: A scheduler answers between two steps, so this bounds one step; a stuck one is the watchdog's business.
ANSWER_TIMEOUT_S = 60.0


class ControlCalls:
    """Questions under way, by number."""

    def __init__(self, send: Callable[[io_struct.Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._failed: str | None = None

    async def ask(self, build: Callable[[int], io_struct.Message]) -> Any:
        """Send `build(number)` and wait for the answer to that number."""
        if self._failed is not None:
            raise RequestRejected(self._failed, status_code=503)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(build(number))
            return await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            message = f"the scheduler did not answer within {ANSWER_TIMEOUT_S:.0f} s"
            raise RequestRejected(message, status_code=503) from error
        finally:
            del self._waiting[number]

    def answer(self, message: io_struct.FlushCacheReqOutput | io_struct.GetInternalStateReqOutput) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        future = self._waiting.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self, cause: str) -> None:
        """No answer will come any more."""
        self._failed = cause
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestRejected(cause, status_code=500, err_type="InternalServerError"))

"""Owns a scheduler whose messages a test writes, and a real tokenizer manager over it.

Read by unit tests of the request side. Messages go through bytes and back. It must not answer by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import io_struct
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.tokenizer.tokenizer import Tokenizer
from sglang.test.test_utils import published_topology

VOCAB = 400


class FakeScheduler:
    """The other end of the channel: what was sent to it, and what it answers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._out: asyncio.Queue[io_struct.Message] = asyncio.Queue()
        self._taken = False
        #: Its answer to a message as soon as that is sent, where a test sets it.
        self.answer: Callable[[Any], io_struct.Message] | None = None

    def send(self, message: io_struct.Message) -> None:
        # Through bytes and back: what cannot be written as msgpack must not pass a test.
        self.sent.append(io_struct.decode(io_struct.encode(message)))
        if self.answer is not None:
            self.say(self.answer(message))

    async def recv(self) -> io_struct.Message:
        # Whoever waits for the next message has handled the one before.
        if self._taken:
            self._out.task_done()
        self._taken = False
        message = await self._out.get()
        self._taken = True
        return message

    def close(self) -> None:
        """Nothing is open."""

    async def handled(self) -> None:
        """Return when every answer so far has been handled."""
        await self._out.join()

    @property
    def requests(self) -> list[io_struct.TokenizedGenerateReqInput]:
        return [m for m in self.sent if isinstance(m, io_struct.TokenizedGenerateReqInput)]

    @property
    def aborts(self) -> list[io_struct.AbortReq]:
        return [m for m in self.sent if isinstance(m, io_struct.AbortReq)]

    def say(self, message: io_struct.Message) -> None:
        self._out.put_nowait(message)

    def tokens(
        self, rid: str, ids: list[int], total: int, end: io_struct.FinishReason | None = None, **more: Any
    ) -> None:
        output = io_struct.TokenOutput(
            rid=rid,
            new_ids=ids,
            finish_reason=end,
            prompt_tokens=3,
            completion_tokens=total,
            cached_tokens=1,
            num_retractions=0,
            **more,
        )
        self.say(io_struct.BatchTokenIDOutput(outputs=[output]))


LENGTH = io_struct.FinishReason(type="length", length=2)


@contextlib.asynccontextmanager
async def manager_over(
    tokenizer: Tokenizer | None, **fields: Any
) -> AsyncIterator[tuple[TokenizerManager, FakeScheduler]]:
    config = SimpleNamespace(context_len=100, vocab_size=VOCAB, generation_defaults={"temperature": 0.25})
    with published_topology(**{"random_seed": 1, "served_model_name": "m", **fields}):
        channel = FakeScheduler()
        manager = TokenizerManager(
            model_config=config,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            channel=channel,
            rank_info={"max_total_num_tokens": 1000},
        )
        manager.start()
        try:
            yield manager, channel
        finally:
            await manager.stop()


async def whole(manager: TokenizerManager, **fields: Any) -> Any:
    answer = None
    async for item in manager.generate_request(GenerateReqInput(**fields)):
        answer = item
    return answer


def play(
    scenario: Callable[[TokenizerManager, FakeScheduler], Awaitable[None]], tokenizer: Any, **fields: Any
) -> None:
    async def main() -> None:
        async with manager_over(tokenizer, **fields) as (manager, channel):
            await scenario(manager, channel)

    asyncio.run(main())

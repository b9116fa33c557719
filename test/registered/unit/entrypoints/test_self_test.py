"""What the server asks itself before it says that it is ready."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.entrypoints.engine_core import EngineCore
from sglang.srt.entrypoints.server_main import why_no_start
from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.fakes.fake_scheduler import LENGTH, FakeScheduler, play
from sglang.test.text_tokenizers import write_text_tokenizer
from sglang.test.waiting import until


def self_test(manager: TokenizerManager) -> asyncio.Task[None]:
    core: Any = SimpleNamespace(manager=manager)
    return asyncio.create_task(EngineCore.self_test(core))


async def asked(channel: FakeScheduler) -> io_struct.TokenizedGenerateReqInput:
    await until(lambda: channel.requests)
    return channel.requests[0]


@pytest.mark.parametrize("kind", ["byte-level", "word-level"])
def test_it_streams_a_text_of_the_tokenizer(tmp_path: pathlib.Path, kind: str) -> None:
    """Only a stream makes text of every token by itself, which is where odd tokenizers failed."""
    tokenizer = load_tokenizer(write_text_tokenizer(tmp_path, kind))

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = self_test(manager)
        request = await asked(channel)
        assert request.stream and request.input_ids == tokenizer.encode("The capital city of France is")
        channel.tokens(request.rid, [5], 1)
        channel.tokens(request.rid, [6], 2, LENGTH)
        await until(lambda: isinstance(channel.sent[-1], io_struct.FlushCacheReqInput))
        channel.say(io_struct.FlushCacheReqOutput(call_id=channel.sent[-1].call_id, success=True))
        await task

    play(scenario, tokenizer)


def test_a_token_without_text_fails_it(tmp_path: pathlib.Path) -> None:
    """The twin: a stream that ends with an error must not be followed by the ready line."""
    tokenizer = load_tokenizer(write_text_tokenizer(tmp_path, "word-level"))

    def decode(self: Tokenizer, ids: list[int], *flags: bool) -> str:
        raise RuntimeError("poison")

    class Poisoned(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = self_test(manager)
        request = await asked(channel)
        Poisoned.decode = decode  # type: ignore[assignment]
        channel.tokens(request.rid, [5], 1)
        with pytest.raises(RequestRejected, match="failed to make this answer"):
            await task

    play(scenario, Poisoned())


@pytest.mark.parametrize("encode", [lambda text: [], None])
def test_a_vocabulary_without_a_word_of_its_text_is_asked_for_a_token(
    tmp_path: pathlib.Path, encode: Any
) -> None:
    def cannot(text: str) -> list[int]:
        raise ValueError("no token for the word")

    tokenizer = load_tokenizer(write_text_tokenizer(tmp_path, "word-level"))
    tokenizer.encode = encode or cannot  # type: ignore[method-assign]

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = self_test(manager)
        assert (await asked(channel)).input_ids == [0]
        task.cancel()

    play(scenario, tokenizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pool_tokens", "the KV cache pool of 3 tokens is too small .*; raise --max-total-tokens "),
        ("context_len", "the context of 3 tokens is too small .*; raise --context-length "),
    ],
)
def test_too_little_room_for_it_is_refused_by_the_flag(tmp_path: pathlib.Path, name: str, words: str) -> None:
    """It was told as the refusal of a request, whose cure was to shorten what nobody had written. The twin
    has the room that the sentence asks for.
    """
    tokenizer = load_tokenizer(write_text_tokenizer(tmp_path, "byte-level"))
    needed = len(tokenizer.encode("The capital city of France is")) + 1

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        small: dict[str, Any] = {name: 3}
        manager.limits = dataclasses.replace(manager.limits, **small)
        with pytest.raises(ValueError, match=f"^{words}") as caught:
            await self_test(manager)
        assert f"at least {needed}, or leave the self-test out with --skip-server-warmup" in str(caught.value)
        assert channel.requests == []
        manager.limits = dataclasses.replace(manager.limits, **{name: needed})
        task = self_test(manager)
        assert (await asked(channel)).sampling_params.max_new_tokens == 1
        task.cancel()

    play(scenario, tokenizer)


def test_a_self_test_that_is_never_done_names_what_allows_it_more_time(tmp_path: pathlib.Path) -> None:
    """The error of a clock has no words of its own."""
    tokenizer = load_tokenizer(write_text_tokenizer(tmp_path, "byte-level"))

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(TimeoutError, match=r"not done in 0 s; allow more with SGLANG_WARMUP_TIMEOUT, or"):
            await self_test(manager)

    with envs.SGLANG_WARMUP_TIMEOUT.override(0):
        play(scenario, tokenizer)


@pytest.mark.parametrize(
    ("error", "testing", "words"),
    [
        (ValueError("--flag 5: take 4"), False, "Initialization failed: --flag 5: take 4"),
        (MemoryError(), False, "Initialization failed: memory is short; "),
        (RuntimeError("a fault of ours"), False, "Initialization failed: RuntimeError: a fault of ours"),
        (RequestRejected("no"), True, "Initialization failed. warmup error: RequestRejected: no"),
        (MemoryError(), True, "Initialization failed. warmup error: MemoryError: memory is short; "),
    ],
)
def test_only_what_the_self_test_found_is_called_so(error: Exception, testing: bool, words: str) -> None:
    assert why_no_start(error, testing=testing).startswith(words)

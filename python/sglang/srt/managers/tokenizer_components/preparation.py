"""Owns the way from a native request to the messages that it becomes: split, check, tokenize, draw seeds.

Used by the tokenizer manager; everything that can refuse a request does so here, before anything is sent.
It must not send, or know which requests are in flight.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tokenizer_components.splitting import SinglePrompt, split_request
from sglang.srt.managers.tokenizer_components.validation import (
    RequestLimits,
    check_prompt,
    finished_message,
    samples_of,
)
from sglang.srt.messages.control import Report
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.requests import TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_device, get_parallel, get_serving
from sglang.srt.tokenizer.tokenizer import LONG_TEXT, Tokenizer


def published_limits(model_config: ModelConfig, rank_info: Report, *, has_tokenizer: bool) -> RequestLimits:
    """What bounds a request here. `rank_info` is the smallest of all ranks: a request may come to any."""
    serving = get_serving()
    return RequestLimits(
        context_len=rank_info.get("context_len", model_config.context_len),
        vocab_size=rank_info.get("vocab_size", model_config.vocab_size),
        pool_tokens=rank_info["max_total_num_tokens"],
        allow_auto_truncate=serving.allow_auto_truncate,
        has_tokenizer=has_tokenizer,
        replicas=get_parallel().num_replicas,
        sampling_defaults=model_config.generation_defaults if serving.sampling_defaults == "model" else {},
    )


class RequestPreparer:
    """Turns requests into messages, with one stream of seeds for those that bring none.

    `check_room` refuses a number of sequences that the server cannot take in now.
    """

    def __init__(
        self, *, tokenizer: Tokenizer | None, limits: RequestLimits, check_room: Callable[[int], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._check_room = check_room
        self._seeds = random.Random(get_device().random_seed)

    async def messages(self, obj: GenerateReqInput) -> list[TokenizedGenerateReqInput]:
        """The messages of a request: prompt by prompt, n samples each. Raises `RequestRejected`."""
        prompts: list[SinglePrompt] = []
        defaults = self._limits.sampling_defaults
        for prompt in split_request(obj, defaults=defaults, check_room=self._check_room):
            check_prompt(prompt, self._limits)
            prompts.append(prompt)
        whole = [self._finished(prompt, ids) for prompt, ids in zip(prompts, await self._tokenize(prompts))]
        # Only now: a refused request draws no seed, so it changes no answer of another one.
        return [
            sample
            for message in whole
            for sample in samples_of(message, stream=obj.stream, fresh_seed=self._seeds.getrandbits(63))
        ]

    def _finished(self, prompt: SinglePrompt, ids: list[int]) -> TokenizedGenerateReqInput:
        message = finished_message(prompt, ids, self._limits)
        if self._tokenizer is not None:
            special_ids = {stop: self._tokenizer.special_id(stop) for stop in message.sampling_params.stop}
            message.special_stops = {i: stop for stop, i in special_ids.items() if i is not None}
        return message

    async def _tokenize(self, prompts: list[SinglePrompt]) -> list[list[int]]:
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        if not texts:
            return [prompt.input_ids or [] for prompt in prompts]
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise refused("text", "the server runs with --skip-tokenizer-init; send input_ids")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text) for text in texts]

        try:
            # Long texts are tokenized on a thread, so that the event loop goes on.
            return await asyncio.to_thread(encode) if sum(map(len, texts)) > LONG_TEXT else encode()
        except ValueError as error:
            raise RequestRejected(str(error)) from error

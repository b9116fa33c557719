"""Owns the way from a native request to the messages that it becomes: split, check, tokenize, draw seeds.

Used by the tokenizer manager; everything that can refuse a request does so here, before anything is sent.
It must not send, or know which requests are in flight.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tokenizer_components.splitting import SinglePrompt, rejected, split_request
from sglang.srt.managers.tokenizer_components.validation import (
    RequestLimits,
    finished_message,
    samples_of,
    sampling_of,
)
from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.runtime_context import get_device, get_parallel, get_serving
from sglang.srt.tokenizer.tokenizer import Tokenizer

#: Texts longer than this (characters, all prompts of a call) are tokenized on a thread, beside the event
#: loop.
LONG_TEXT = 4000


def published_limits(
    model_config: ModelConfig, rank_info: dict[str, Any], *, has_tokenizer: bool
) -> RequestLimits:
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
    """Turns requests into messages, with one stream of seeds for those that bring none."""

    def __init__(self, *, tokenizer: Tokenizer | None, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._seeds = random.Random(get_device().random_seed)

    async def messages(self, obj: GenerateReqInput) -> list[io_struct.TokenizedGenerateReqInput]:
        """The messages of a request: prompt by prompt, n samples each. Raises `RequestRejected`."""
        prompts = split_request(obj)
        try:
            sampling = [sampling_of(prompt, self._limits) for prompt in prompts]
            all_ids = await self._tokenize(prompts)
            whole = [
                finished_message(prompt, ids, params, self._limits)
                for prompt, ids, params in zip(prompts, all_ids, sampling)
            ]
        except ValueError as error:
            text = str(error)
            field, colon, _ = text.partition(":")
            field = field.partition("[")[0]  # logit_bias[5]
            raise RequestRejected(text, param=field if colon and field.isidentifier() else None) from error
        for message in whole:
            message.special_stops = self._special_stops(message.sampling_params.stop)
        return [
            sample
            for message in whole
            for sample in samples_of(message, stream=obj.stream, fresh_seed=self._seeds.getrandbits(63))
        ]

    def _special_stops(self, stop: list[str]) -> dict[int, str]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return {}
        return {token_id: text for text in stop if (token_id := tokenizer.special_id(text)) is not None}

    async def _tokenize(self, prompts: list[SinglePrompt]) -> list[list[int]]:
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        if not texts:
            return [prompt.input_ids or [] for prompt in prompts]
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise rejected("text", "the server runs with --skip-tokenizer-init; send input_ids")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text) for text in texts]

        if sum(map(len, texts)) > LONG_TEXT:
            return await asyncio.to_thread(encode)
        return encode()

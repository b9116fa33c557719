"""Owns the sampling parameters of one request: their names and defaults.

Read by every door, the scheduler and the sampler. `messages/sampling_fields.py` says which values a client
may give. It must not know about tensors, tokenizers or transports.
"""

from __future__ import annotations

import msgspec

#: A temperature below this is greedy: dividing logits by it would overflow.
GREEDY_TEMPERATURE = 1e-6


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of one request are drawn and when it ends (SGLang's names and defaults).

    `max_new_tokens=None` means "what context and KV pool leave". `top_k=-1` is off. `temperature` below
    `GREEDY_TEMPERATURE` is greedy. `logit_bias` maps token ids to an additive bias.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token after penalties and bias is taken, the lowest id among equals."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were produced before lose by it."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

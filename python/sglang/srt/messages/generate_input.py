"""Owns the native generate request as the doors hand it over: one prompt or a batch, not yet tokenized.

Built by `/generate`, the OpenAI routes and the Engine; read by the tokenizer manager, which splits it into
single prompts. It must not cross a process border and must not know about HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

SamplingMapping = Mapping[str, object]


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """A native request. Exactly one of `text` and `input_ids` is given; a list of them makes a batch.

    In a batch every field of a prompt may be one value for all or a list of the batch's length.
    `sampling_params` holds the client's mapping (or a list of them), not yet checked.
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingMapping | list[SamplingMapping] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    priority: int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    routed_dp_rank: int | list[int] | None = None
    no_logs: bool = False

    @property
    def is_batch(self) -> bool:
        """True when the answer is a list: a list of texts, or a list of id lists."""
        if self.text is not None:
            return isinstance(self.text, list)
        return self.input_ids is not None and len(self.input_ids) > 0 and isinstance(self.input_ids[0], list)

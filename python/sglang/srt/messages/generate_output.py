"""Owns the shape of a native answer: what `/generate` writes and the OpenAI routes read.

Built by the tokenizer manager. It must not build or change an answer.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

#: log-probability, token id, text where the request wants it
LogprobEntry = tuple[float | None, int, str | None]
LogprobEntries = list[LogprobEntry]


class MetaInfo(TypedDict):
    """Counts, times and log-probabilities; the lists with an entry for each token come on demand.

    The `spec_` entries are there with a draft only.
    """

    id: str
    finish_reason: dict[str, object] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    weight_version: str
    num_retractions: int
    dp_rank: int
    input_token_logprobs: NotRequired[LogprobEntries]
    input_top_logprobs: NotRequired[list[LogprobEntries | None]]
    input_token_ids_logprobs: NotRequired[list[LogprobEntries | None]]
    output_token_logprobs: NotRequired[LogprobEntries]
    output_top_logprobs: NotRequired[list[LogprobEntries | None]]
    output_token_ids_logprobs: NotRequired[list[LogprobEntries | None]]
    output_token_logprobs_length: NotRequired[int]
    spec_verify_ct: NotRequired[int]
    spec_num_correct_drafts: NotRequired[int]
    spec_num_proposed_drafts: NotRequired[int]
    spec_correct_drafts_histogram: NotRequired[list[int]]
    spec_accept_length: NotRequired[float]
    spec_accept_rate: NotRequired[float]
    e2e_latency: NotRequired[float]
    response_sent_to_client_ts: NotRequired[float]


class NativeOutput(TypedDict):
    """One sequence as far as it is known; `index` is there in streams of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]


#: One item of an answer: a batch, or a request with several samples, is answered by a list when it is whole.
NativeAnswer = NativeOutput | list[NativeOutput]

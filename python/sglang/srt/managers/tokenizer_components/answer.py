"""Owns the native answer to one call, built from the states of its samples.

Used by the tokenizer manager, whose answers all doors read; so it lies here and not in `entrypoints/native`,
which the manager cannot import. It must not send, decode text or know about HTTP.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import cast

from sglang.srt.managers.tokenizer_components.state import SampleState
from sglang.srt.messages.generate_output import LogprobEntries, LogprobEntry, MetaInfo, NativeOutput
from sglang.srt.messages.requests import SpecCounts, TokenizedGenerateReqInput, TokenLogprob

#: Name of a native list -> its entries, one for each token.
_Lists = dict[str, list[object]]


@dataclasses.dataclass(slots=True)
class _HandedOut:
    """How much of one sample the call has had, so that the cost of an answer is that of what is new in it."""

    chars: int = 0
    ids: int = 0
    logprobs: int = 0
    input: _Lists = dataclasses.field(default_factory=dict)
    input_source: list[TokenLogprob] | None = None
    #: The native lists so far; an incremental call keeps none.
    output: _Lists = dataclasses.field(default_factory=dict)


class AnswerBuilder:
    """Builds the native answers of one call.

    They are cumulative, or with `incremental` hold only what is new in `text`, `output_ids` and the output's
    logprobs; counts and everything about the prompt are whole in both.
    """

    def __init__(
        self,
        *,
        weight_version: str,
        return_prompt_token_ids: bool,
        token_text: Callable[[int], str | None] | None,
        incremental: bool = False,
    ) -> None:
        self._weight_version = weight_version
        self._return_prompt_token_ids = return_prompt_token_ids
        self._token_text = token_text
        self._incremental = incremental
        self._handed_out: dict[int, _HandedOut] = {}

    def answer(self, sample: SampleState, *, with_index: bool) -> NativeOutput:
        """What is known of one sample by now; later outputs do not change the lists in it."""
        had = self._handed_out.setdefault(sample.index, _HandedOut())
        answer: NativeOutput = {
            "text": sample.text[had.chars :],
            "output_ids": sample.output_ids[had.ids :],
            "meta_info": self._meta_info(sample, had),
        }
        if self._incremental:
            had.chars, had.ids = len(sample.text), len(sample.output_ids)
        if self._return_prompt_token_ids:
            answer["prompt_token_ids"] = sample.message.input_ids
        if with_index:
            answer["index"] = sample.index
        return answer

    def _meta_info(self, sample: SampleState, had: _HandedOut) -> MetaInfo:
        reason = sample.finish_reason
        meta: dict[str, object] = {
            "id": sample.rid,
            "finish_reason": None if reason is None else reason.to_json(),
            "prompt_tokens": sample.prompt_tokens,
            "completion_tokens": sample.completion_tokens,
            "cached_tokens": sample.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": self._weight_version,
            "num_retractions": sample.num_retractions,
            "dp_rank": sample.dp_rank,
        }
        if sample.spec is not None:
            _add_spec(meta, sample.spec, sample.completion_tokens)
        if sample.message.return_logprob:
            self._add_logprobs(meta, sample, had)
        if sample.finished_at is not None:
            meta["e2e_latency"] = sample.finished_at - sample.created
            meta["response_sent_to_client_ts"] = time.time()
        return cast(MetaInfo, meta)

    def _add_logprobs(self, meta: dict[str, object], sample: SampleState, had: _HandedOut) -> None:
        if had.input_source is not sample.input_logprobs:
            had.input_source = sample.input_logprobs
            had.input = self._native("input", sample.message, sample.input_logprobs)
        meta.update(had.input)
        fresh = self._native("output", sample.message, sample.output_logprobs[had.logprobs :])
        had.logprobs = len(sample.output_logprobs)
        for name, entries in fresh.items():
            if self._incremental:
                meta[name] = entries
            else:
                had.output.setdefault(name, []).extend(entries)
                meta[name] = list(had.output[name])
        meta["output_token_logprobs_length"] = len(sample.output_logprobs)

    def _native(self, side: str, message: TokenizedGenerateReqInput, entries: list[TokenLogprob]) -> _Lists:
        lists: _Lists = {f"{side}_token_logprobs": [self._entry(e.logprob, e.token_id) for e in entries]}
        if message.top_logprobs_num > 0:
            lists[f"{side}_top_logprobs"] = [self._entries(e.top) for e in entries]
        if message.token_ids_logprob is not None:
            lists[f"{side}_token_ids_logprobs"] = [self._entries(e.chosen) for e in entries]
        return lists

    def _entries(self, pairs: list[tuple[float, int]] | None) -> LogprobEntries | None:
        return None if pairs is None else [self._entry(logprob, token_id) for logprob, token_id in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        text = None if self._token_text is None else self._token_text(token_id)
        return (logprob, token_id, text)


def _add_spec(meta: dict[str, object], spec: SpecCounts, completion_tokens: int) -> None:
    """The counts of a draft under SGLang's names.

    `spec_accept_length` is theirs: all tokens of the answer for each round, so the one of the prompt's
    forward counts too, and it can be above what a round can emit. Ratios are left out while nothing was
    counted.
    """
    meta["spec_verify_ct"] = spec.num_rounds
    meta["spec_num_correct_drafts"] = spec.num_correct_drafts
    meta["spec_num_proposed_drafts"] = spec.num_proposed_drafts
    meta["spec_correct_drafts_histogram"] = spec.histogram
    if spec.num_rounds:
        meta["spec_accept_length"] = completion_tokens / spec.num_rounds
    if spec.num_proposed_drafts:
        meta["spec_accept_rate"] = spec.num_correct_drafts / spec.num_proposed_drafts

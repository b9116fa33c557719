"""Owns the messages about requests: to the scheduler a request or its abort, from it the tokens and the end.

Written by the tokenizer manager and by the scheduler. They must not act: no sockets, no tensors, no defaults
that depend on configuration.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang.srt.sampling.sampling_params import SamplingParams

#: What a zero probability reads as in every answer: JSON has no minus infinity.
LOGPROB_FLOOR = -9999.0


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a request ended.

    `matched` is the stop token id or the stop string, `length` the number of tokens produced. An abort with a
    `status_code` becomes that HTTP status; an abort by the user has none and is an ordinary answer.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, object]:
        """The native `finish_reason` object."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {
            "type": "abort",
            "message": self.message or "Aborted",
            "status_code": self.status_code,
            "err_type": self.err_type,
        }


class TokenLogprob(msgspec.Struct, array_like=True):
    """The log-probability of one token at one position, with the alternatives that the request names.

    `logprob` is None for the first prompt token. `top` is sorted, best first; `chosen` follows the order of
    `token_ids_logprob`. All values are finite, so they are JSON-safe: a token whose probability is zero reads
    `LOGPROB_FLOOR`.
    """

    logprob: float | None
    token_id: int
    top: list[tuple[float, int]] | None = None
    chosen: list[tuple[float, int]] | None = None


class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """One sequence to generate; a batch, or a request with n above 1, becomes several of these.

    `sampling_params.max_new_tokens` is an int that fits the context, and `sampling_seed` is set.
    `logprob_start_len` is -1 for "no prompt logprobs". `extra_key` is the namespace in the prefix cache.
    `routed_dp_rank` is the replica that the client chose; `parent_rid` is shared by the n samples of one
    prompt, None where there is one. `special_stops` holds the stop strings that are a special token, by its
    id: no text shows them.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    parent_rid: str | None = None
    special_stops: dict[int, str] = {}


class RequestHead(msgspec.Struct, tag=str(TokenizedGenerateReqInput.__struct_config__.tag)):
    """The same bytes as a request, read no further than its name."""

    rid: str


class AbortReq(msgspec.Struct, kw_only=True, tag=True):
    """Abort the requests whose rid starts with `rid` (as SGLang does), or all; an empty `rid` aborts none.

    `exact` limits it to that one rid: a client that hangs up on `a1` must not take `a10` with it.
    """

    rid: str = ""
    abort_all: bool = False
    exact: bool = False

    def names(self, rid: str) -> bool:
        """Whether the request `rid` is one of them."""
        if self.abort_all or not self.rid:
            return self.abort_all
        return rid == self.rid if self.exact else rid.startswith(self.rid)


class SpecCounts(msgspec.Struct, array_like=True):
    """What a draft did for one request, or for all of them: a round is one verify forward for one request.

    A round emits its correct drafts and one token of the target's own. `histogram[c]` counts the rounds with
    c correct drafts.
    """

    num_rounds: int = 0
    num_correct_drafts: int = 0
    num_proposed_drafts: int = 0
    histogram: list[int] = msgspec.field(default_factory=list)

    def add_round(self, correct: int, proposed: int) -> None:
        """Count one more round, of so many drafts."""
        self.num_rounds += 1
        self.num_correct_drafts += correct
        self.num_proposed_drafts += proposed
        self.histogram.extend([0] * (correct + 1 - len(self.histogram)))
        self.histogram[correct] += 1

    def snapshot(self) -> SpecCounts:
        """The counts as they are now, for a message: counting goes on while it is under way."""
        return msgspec.structs.replace(self, histogram=self.histogram.copy())


class TokenOutput(msgspec.Struct, kw_only=True, array_like=True):
    """What one request has got since the last message: new ids, and its end where it has ended.

    `output_logprobs` has one entry for each of `new_ids` where the request wants logprobs; `input_logprobs`
    comes once, with the first output. `spec` counts since the request's start; None without a draft.
    """

    rid: str
    new_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    output_logprobs: list[TokenLogprob] | None = None
    input_logprobs: list[TokenLogprob] | None = None
    spec: SpecCounts | None = None


class BatchTokenIDOutput(msgspec.Struct, kw_only=True, tag=True):
    """The outputs of all requests that one scheduler step moved on."""

    outputs: list[TokenOutput]
    dp_rank: int = 0

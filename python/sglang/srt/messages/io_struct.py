"""Owns every message that crosses a process border, as tagged msgspec structs in msgpack (never pickle).

Read by the tokenizer manager, the scheduler and the rank processes. It must not act: no sockets, no
tensors, no defaults that depend on configuration. One message per scheduler step carries the news of all
its requests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.sampling.sampling_params import SamplingParams

#: What a zero probability reads as in every answer: JSON has no minus infinity.
LOGPROB_FLOOR = -9999.0


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a request ended. `matched` is the stop token id or stop string, `length` the number of tokens
    produced.

    An abort with a `status_code` becomes that HTTP status; an abort asked for by the user has none and is
    an ordinary answer.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, Any]:
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
    """The log-probability of one token at one position, with the alternatives that were asked for.

    `logprob` is None for the first prompt token. `top` is sorted, best first; `chosen` follows the order of
    the ids asked. All values are finite (a token whose probability is zero reads `LOGPROB_FLOOR`, never
    minus infinity), so they are JSON-safe.
    """

    logprob: float | None
    token_id: int
    top: list[tuple[float, int]] | None = None
    chosen: list[tuple[float, int]] | None = None


# --- to the scheduler -------------------------------------------------------------------------------------


class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """One sequence to generate (a request with n > 1 or a batch arrives as several of these).

    `sampling_params.max_new_tokens` is already resolved to an int that fits the context; `sampling_seed` is
    always set. `logprob_start_len` is -1 for "no prompt logprobs". `extra_key` names the prefix-cache
    namespace. `routed_dp_rank` is the replica that the client asked for; `parent_rid` is shared by the n
    samples of one prompt, None where there is one. `special_stops` are the stop strings that are a special
    token, by its id: no text shows them.
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
    priority: int | None = None
    routed_dp_rank: int | None = None
    parent_rid: str | None = None
    special_stops: dict[int, str] = {}


class AbortReq(msgspec.Struct, kw_only=True, tag=True):
    """Abort the requests whose rid starts with `rid` (prefix match, as SGLang), or all. An empty `rid`
    aborts nothing.

    `exact` limits it to that one rid (a disconnect must not hit a neighbour named `a10` when `a1` leaves).
    """

    rid: str = ""
    abort_all: bool = False
    exact: bool = False


class FlushCacheReqInput(msgspec.Struct, kw_only=True, tag=True):
    """Drop the prefix cache; refused while requests run or wait."""

    call_id: int


class GetInternalStateReq(msgspec.Struct, kw_only=True, tag=True):
    """Ask for the scheduler's counters."""

    call_id: int


class GetPlacementReq(msgspec.Struct, kw_only=True, tag=True):
    """Ask for the live parallel context of every rank behind one leader."""

    call_id: int


class DispatchedReq(msgspec.Struct, kw_only=True, tag=True):
    """How many messages each attention-DP replica has been sent so far, this one not counted.

    Only the leader of replica 0 gets it. It is the one that sleeps when nobody has work, and it must not
    while a message is on its way to another replica.
    """

    counts: list[int]


class ShutdownReq(msgspec.Struct, kw_only=True, tag=True):
    """Leave the event loop now; whatever still runs is dropped (the server drains before it sends this)."""


# --- from the scheduler -----------------------------------------------------------------------------------


class TokenOutput(msgspec.Struct, kw_only=True, array_like=True):
    """News of one request since the last message: ids produced since then, and the end if it ended.

    `output_logprobs` has one entry per id in `new_ids` when logprobs were asked; `input_logprobs` is sent
    once, with the first output.
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


class BatchTokenIDOutput(msgspec.Struct, kw_only=True, tag=True):
    """All news of one scheduler step."""

    outputs: list[TokenOutput]
    dp_rank: int = 0


class FlushCacheReqOutput(msgspec.Struct, kw_only=True, tag=True):
    call_id: int
    success: bool
    message: str = ""
    dp_rank: int = 0


class GetInternalStateReqOutput(msgspec.Struct, kw_only=True, tag=True):
    """Counters of one scheduler, JSON-safe plain values (`internal_states` of /server_info)."""

    call_id: int
    state: dict[str, Any]
    dp_rank: int = 0


class GetPlacementReqOutput(msgspec.Struct, kw_only=True, tag=True):
    """The ranks of one attention-TP group, in its order.

    An entry of `ranks` is `{"world_rank", "dp_rank", "names": {name: [value, layer]}}`; an entry of
    `overrides` is one write to the context after publish, with the `world_rank` it happened on.
    """

    call_id: int
    ranks: list[dict[str, Any]]
    overrides: list[dict[str, Any]]
    dp_rank: int = 0


class RankReady(msgspec.Struct, kw_only=True, tag=True):
    """First word of a rank: it is loaded and its loop is about to turn.

    `info` holds `max_total_num_tokens`, `max_req_input_len`, `context_len`, `vocab_size`, `startup_time`
    and what the server must know.
    """

    world_rank: int
    info: dict[str, Any]


class RankFailed(msgspec.Struct, kw_only=True, tag=True):
    """Last word of a rank: the cause, with its traceback for the server's log.

    `secondary` says that a collective failed: most likely another rank is the cause, and its word counts.
    """

    world_rank: int
    message: str
    traceback: str
    secondary: bool = False


Message = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | GetPlacementReq
    | DispatchedReq
    | ShutdownReq
    | BatchTokenIDOutput
    | FlushCacheReqOutput
    | GetInternalStateReqOutput
    | GetPlacementReqOutput
    | RankReady
    | RankFailed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Message -> msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """msgpack bytes -> message; `msgspec.ValidationError` (a `ValueError`) for anything that is not one of
    ours."""
    return _decoder.decode(data)

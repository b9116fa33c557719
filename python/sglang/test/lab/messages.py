"""Owns the messages between the layout lab and its rank processes: one order and one report a cell.

Written by `world` and `rank`, as msgpack frames over pipes; tensors travel as bytes. It must not import
torch, which the side that gives the orders does not need.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.messages.io_struct import FinishReason, TokenizedGenerateReqInput, TokenLogprob

#: Groups whose calls are reported, as the context names them (without `_group`).
GROUPS = ("world", "tp", "pp", "dcp", "attn_tp", "attn_cp", "moe_ep", "moe_dp", "moe_tp")

#: What a forward reads of its placement.
PLACEMENT_NAMES = ("tp_size", "tp_rank", "attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank")

#: First frame of a rank: it has joined its world.
JOINED = b"joined"
#: Limit for the start of a world: several ranks import torch and meet, on a busy machine.
START_TIMEOUT_S = 120.0


class CellOrder(msgspec.Struct, kw_only=True):
    """What one rank does for one cell.

    `phases` holds its inbox at the beginning of each phase; a rank that leads no group has as many, all
    empty.
    """

    fields: dict[str, Any]  # of the record
    world_rank: int
    dp_rank: int | None
    with_bundle: bool
    is_attn_tp_leader: bool
    #: The worker is a draft that owns its attention: built and run in that scope.
    in_draft_scope: bool = False
    phases: list[list[TokenizedGenerateReqInput]]
    #: Name of the fault to plant, in `faults` or `draft_faults`; it stays until an order names another one,
    #: or none.
    fault: str | None = None


class RequestReport(msgspec.Struct, kw_only=True):
    """Everything that the leader sent about one request."""

    ids: list[int]
    finish_reason: FinishReason | None
    cached_tokens: int
    num_retractions: int
    output_logprobs: list[TokenLogprob]
    input_logprobs: list[TokenLogprob] | None
    #: How many rounds it is said to have had; 0 without a draft.
    num_rounds: int = 0


class ModelReport(msgspec.Struct, kw_only=True):
    """What one model on a rank holds, and its forwards during the phases.

    Forwards are counted by mode, those over requests with several rows apart from those with one: `extend`,
    `decode x1`, `target_verify x4`; those of a replica without requests as `idle extend`, `idle x4`.
    """

    parameter_bytes: int
    kv_bytes_per_token: int
    forwards: dict[str, int] = {}
    #: Forwards of several replicas by padding.
    paddings: dict[str, int] = {}
    #: Forwards that were replayed from a recorded list, and those of them on an idle replica.
    num_replays: int = 0
    num_idle_replays: int = 0
    #: Calls of the head that these forwards need: see `recorders.head_calls`.
    head_calls: int = 0
    #: Forward, by its name above, or `construction` -> what of `PLACEMENT_NAMES` it read.
    placements: dict[str, list[int]] = {}

    @property
    def num_idle(self) -> int:
        return sum(count for name, count in self.forwards.items() if name.startswith("idle"))

    @property
    def num_forwards(self) -> int:
        return sum(self.forwards.values())


class RankReport(msgspec.Struct, kw_only=True):
    """What one rank measured during a cell."""

    requests: dict[str, RequestReport]  # by rid; empty on a rank that leads no group
    #: Seed of the request -> float32 logits [tokens drawn, vocab], as bytes; before sampling. A round that
    #: goes past the end of a request leaves more rows than it has tokens.
    draws: dict[int, bytes]
    vocab_size: int
    target: ModelReport
    #: None where nothing is drafted by a model.
    draft: ModelReport | None = None
    #: Group -> method -> calls during the phases.
    calls: dict[str, dict[str, int]]
    #: Forwards that held part of a prompt and drew nothing for it.
    unfinished_prompts: int
    #: Steps of the scheduler, over all phases.
    steps: int
    #: Seed of the request -> (nodes verified, tokens got) in each of its rounds; of a leader.
    rounds: dict[int, list[tuple[int, int]]] = {}
    #: Entries into scopes of a draft during the phases: of one that is `owning` its attention or `following`,
    #: and into its `pipeline` scope, which is for construction.
    scope_entries: dict[str, int] = {}


class RankError(msgspec.Struct, kw_only=True):
    """The cell failed on this rank."""

    kind: str  # class of the exception
    message: str
    traceback: str


class RankAnswer(msgspec.Struct, kw_only=True):
    """Exactly one of the two."""

    report: RankReport | None = None
    error: RankError | None = None


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(CellOrder).decode
decode_answer = msgspec.msgpack.Decoder(RankAnswer).decode

"""Owns the data of one forward: what the scheduler hands to the worker, and what it gets back.

Built by the scheduler, read by the model runner, the attention back end, the logits processor and the
sampler. It must not compute. Tensors are int64 on the device of the model; those of `num_tokens` entries list
the requests' new tokens one request after another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.messages.io_struct import TokenLogprob

if TYPE_CHECKING:
    from sglang.srt.batch.logprobs import LogprobRequest
    from sglang.srt.batch.sampling_state import SamplingState
    from sglang.srt.batch.spec_input import SpecInput


NOT_FINITE = (
    "the model gave logits that are not finite for this request (NaN or infinity); the request is ended and "
    "others are not affected. Try --dtype float32 if this repeats"
)
NOTHING_LEFT = (
    "min_new_tokens keeps back every token this vocabulary has; use fewer stop_token_ids or no min_new_tokens"
)
#: Why a row of logits gave no token, by the number in `DrawnTokens.failures`; 0 is a row that gave one.
ROW_FAILURES = (None, NOT_FINITE, NOTHING_LEFT)


class ForwardMode(enum.Enum):
    """What the rows of a forward are.

    EXTEND: new tokens of prompts. DECODE: the newest token of each request; a draft may bring several
    candidates of each. TARGET_VERIFY: the nodes of each request's draft tree. DRAFT_EXTEND: the accepted
    tokens of each request, for the draft's own cache. IDLE: nothing of this replica.
    """

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class DpStep:
    """What the attention-DP replicas of one tensor group agreed on before a forward; lists in replica order.

    A replica without requests is listed with zeros and takes the step all the same. `slots_per_request` is
    what every replica's `ForwardBatch.slots_per_request` allows.
    """

    num_tokens: list[int]
    num_logit_rows: list[int]
    is_extend: bool  # some replica computes a prompt
    num_requests: list[int] = field(default_factory=list)
    slots_per_request: int = 1

    def of_phase(self, *, rows: int, logit_rows: int) -> DpStep:
        """The step of one phase of a speculative round, in which each request has so many rows."""
        return replace(
            self,
            num_tokens=[count * rows for count in self.num_requests],
            num_logit_rows=[count * logit_rows for count in self.num_requests],
        )


@dataclass(slots=True)
class ForwardBatch:
    """One forward over `batch_size` requests with `num_tokens` new tokens in all.

    For request b: `seq_lens[b]` tokens are in the cache after this forward, of which `extend_lens[b]` are
    new (1 each in DECODE) and `seq_lens[b] - extend_lens[b]` were there before (prefix hit, earlier chunks,
    earlier decode steps). `out_cache_loc` holds the pool slot of every new token.
    `req_to_token[req_pool_indices[b], :seq_lens[b]]` lists all slots of request b in order.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    out_cache_loc: torch.Tensor  # [num_tokens]
    req_pool_indices: torch.Tensor  # [batch_size]
    seq_lens: torch.Tensor  # [batch_size]
    seq_lens_list: list[int]
    extend_lens: list[int]
    #: One per request; None where nothing is drawn, because the prompt is not complete after this chunk.
    sampling_states: list[SamplingState | None]
    #: One per request, None where no logprob is asked for; the list itself is None where none is at all.
    logprob_requests: list[LogprobRequest | None] | None = None
    #: With attention data parallelism: the step that this forward is one replica's part of.
    dp_step: DpStep | None = None
    #: What a forward of a speculative round has beside its tokens.
    spec: SpecInput | None = None
    #: Ask the model for the hidden rows of all tokens, which a draft reads.
    capture_hidden: bool = False
    #: EXTEND: the token that follows this part of the prompt; None where the sampled one follows.
    next_prompt_ids: list[int | None] | None = None
    #: DECODE: how many slots from its position on each request has, for the nodes of a round.
    slots_per_request: int = 1
    #: DECODE: the last tokens of each request, the newest last; only for a worker that asks for them.
    recent_ids: list[list[int]] | None = None

    @classmethod
    def idle(cls, dp_step: DpStep, device: torch.device) -> ForwardBatch:
        """The batch of a replica without requests, which takes part in the collectives all the same."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(ForwardMode.IDLE, none, none, none, none, none, [], [], [], dp_step=dp_step)

    @property
    def num_logit_rows(self) -> int:
        """Rows of last hidden states that the head scores.

        One a drawing request and one a prompt target; in a speculative round those that it names.
        """
        if self.spec is not None:
            rows = self.spec.logit_rows
            return self.num_tokens if rows is None else int(rows.shape[0])
        drawing = sum(state is not None for state in self.sampling_states)
        return drawing + sum(len(request.targets) for request in self.logprob_requests or () if request)

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_list)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class DrawnTokens:
    """What the sampler gave, one entry a row of logits; a device may still be computing the tensor.

    `rows` int64 [2, rows]: token ids, and indices into `ROW_FAILURES`. The token of a failed row means
    nothing.
    """

    rows: torch.Tensor
    logprobs: list[TokenLogprob | None]

    @property
    def token_ids(self) -> torch.Tensor:
        return self.rows[0]

    @property
    def failures(self) -> torch.Tensor:
        return self.rows[1]

    def read(self) -> tuple[list[int], list[int]]:
        """Wait for the tokens: their ids, and the failures."""
        ids, failures = self.rows.tolist()
        return ids, failures


@dataclass(slots=True)
class GenerationBatchResult:
    """What a forward gave, one entry per request of the batch, in its order.

    `next_token_ids[b]` is empty where nothing was drawn; a speculative round gives one token or several.
    `failures[b]` says why this request alone failed, after the tokens that it still got. `output_logprobs[b]`
    has one entry for each token; `input_logprobs[b]` one per target asked. Tokens are in the lists once
    `read` has been called.
    """

    next_token_ids: list[list[int]]
    failures: list[str | None]
    output_logprobs: list[list[TokenLogprob]] | None = None
    input_logprobs: list[list[TokenLogprob] | None] | None = None
    #: A speculative round: how many tokens of the draft were right, and how many it proposed for each
    #: request.
    num_correct_drafts: list[int] | None = None
    num_proposed_drafts: int = 0
    #: Whether the target's forward replayed a recorded graph.
    replayed: bool = False
    #: The requests that `drawn` has rows of, and what was drawn for them, until it is read.
    drawing: list[int] = field(default_factory=list)
    drawn: DrawnTokens | None = None

    def read(self) -> None:
        """Wait for the drawn tokens and enter them in the lists.

        Called by the first who needs their values; a second call changes nothing.
        """
        if self.drawn is None:
            return
        drawn, self.drawn = self.drawn, None
        for b, token_id, failure, logprob in zip(self.drawing, *drawn.read(), drawn.logprobs, strict=True):
            self.failures[b] = self.failures[b] or ROW_FAILURES[failure]
            if self.failures[b] is None:
                self.next_token_ids[b] = [token_id]
                if self.output_logprobs is not None and logprob is not None:
                    self.output_logprobs[b] = [logprob]

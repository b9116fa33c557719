"""Owns the words of one forward: what the scheduler hands to the worker, and what comes back.

Built by the scheduler, read by the model runner, the attention back end, the logits processor and the
sampler. It must not act; tensors are int64 on the device of the model, token-major (`num_tokens` rows, the
requests' new tokens one after another).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.messages.io_struct import TokenLogprob

if TYPE_CHECKING:
    from sglang.srt.batch.logprobs import LogprobRequest
    from sglang.srt.batch.sampling_state import SamplingState


class ForwardMode(enum.Enum):
    """What the rows of a forward are. A row of an EXTEND batch with one new token is a decode row in all but
    name.
    """

    EXTEND = "extend"
    DECODE = "decode"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class DpStep:
    """What the attention-DP replicas of one tensor group agreed on before a forward; lists in replica order.

    A replica without requests stands there with zeros and takes the step all the same.
    """

    num_tokens: list[int]
    num_logit_rows: list[int]
    is_extend: bool  # some replica computes a prompt


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
    #: One per request; None for a request whose prompt is not complete after this chunk: nothing is drawn
    #: for it.
    sampling_states: list[SamplingState | None]
    #: One per request, None where no logprob is wanted; the list itself is None when nobody wants any.
    logprob_requests: list[LogprobRequest | None] | None = None
    #: With attention data parallelism: the step that this forward is one replica's part of.
    dp_step: DpStep | None = None

    @classmethod
    def idle(cls, dp_step: DpStep, device: torch.device) -> ForwardBatch:
        """The part of a replica that has nothing to do: no request and no token, every collective."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(ForwardMode.IDLE, none, none, none, none, none, [], [], [], dp_step=dp_step)

    @property
    def num_logit_rows(self) -> int:
        """Rows of last hidden states that the head scores: one a drawing request, one a prompt target."""
        drawing = sum(row is not None for row in self.sampling_states)
        return drawing + sum(len(ask.targets) for ask in self.logprob_requests or () if ask is not None)

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_list)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class GenerationBatchResult:
    """What a forward gave, one entry per request of the batch, in its order.

    `next_token_ids[b]` is None where nothing was drawn. `failures[b]` is a sentence when this row alone
    failed (NaN logits); its token is None then. `output_logprobs[b]` belongs to the token drawn;
    `input_logprobs[b]` has one entry per target asked.
    """

    next_token_ids: list[int | None]
    failures: list[str | None]
    output_logprobs: list[TokenLogprob | None] | None = None
    input_logprobs: list[list[TokenLogprob] | None] | None = None

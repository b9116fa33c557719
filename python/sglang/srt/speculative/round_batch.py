"""Owns the requests of one decode step as a speculative round sees them, and the forwards made over them.

Built by the speculative worker from the scheduler's batch; read by drafters and by verification. It must not
run anything, nor know what a draft proposes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import SpecInput


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of one decode step; of each, `lengths[b]` tokens are in the cache of the target.

    `root_ids` are their newest tokens, which are not. `req_to_token` is the table of slots, in which every
    request has as many from `lengths[b]` on as the round needs.
    """

    root_ids: torch.Tensor  # [batch]
    req_pool_indices: torch.Tensor  # [batch]
    lengths: torch.Tensor  # [batch]
    lengths_list: list[int]
    sampling_states: list[SamplingState]
    req_to_token: torch.Tensor
    recent_ids: list[list[int]] | None
    dp_step: DpStep | None

    @classmethod
    def of(cls, batch: ForwardBatch, req_to_token: torch.Tensor) -> Round:
        """The round behind a DECODE batch."""
        return cls(
            root_ids=batch.input_ids,
            req_pool_indices=batch.req_pool_indices,
            lengths=batch.positions,
            lengths_list=[length - 1 for length in batch.seq_lens_list],
            sampling_states=[state for state in batch.sampling_states if state is not None],
            req_to_token=req_to_token,
            recent_ids=batch.recent_ids,
            dp_step=batch.dp_step,
        )

    @property
    def batch_size(self) -> int:
        return len(self.lengths_list)

    def slots(self, first: int, width: int) -> torch.Tensor:
        """Slots [batch, width] of each request, from the one of position `lengths[b] + first` on."""
        columns = self.lengths[:, None] + torch.arange(first, first + width, device=self.lengths.device)
        return self.req_to_token[self.req_pool_indices[:, None], columns]

    def draft_level(self, level: int, width: int, *, first: int) -> ForwardBatch:
        """A draft's forward over `width` nodes of each request, all at position `lengths[b] + level - 1`.

        Which tokens they are is known when the level before has run.
        """
        rows = self.lengths[:, None].expand(-1, width)
        return self.forward_batch(
            ForwardMode.DECODE,
            torch.zeros_like(rows),
            rows + (level - 1),
            first=first,
            spec=SpecInput(width),
            logit_rows_each=width,
        )

    def forward_batch(
        self,
        mode: ForwardMode,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        first: int = 0,
        spec: SpecInput,
        logit_rows_each: int,
        capture_hidden: bool = False,
    ) -> ForwardBatch:
        """A forward over `spec.width` rows of each request, which write the slots from `first` on.

        token_ids and positions are [batch, width]; a request's keys are those of all its slots up to the last
        one written. `logit_rows_each` is how many rows of each request are scored.
        """
        width = spec.width
        end, step = first + width, self.dp_step
        return ForwardBatch(
            forward_mode=mode,
            input_ids=token_ids.reshape(-1),
            positions=positions.reshape(-1),
            out_cache_loc=self.slots(first, width).reshape(-1),
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.lengths + end,
            seq_lens_list=[length + end for length in self.lengths_list],
            extend_lens=[width] * self.batch_size,
            sampling_states=list(self.sampling_states),
            dp_step=step and step.of_phase(rows=width, logit_rows=logit_rows_each),
            spec=spec,
            capture_hidden=capture_hidden,
        )

"""Owns what a forward hands down to every layer: the batch, the attention back end and its plan.

Built by the model runner, passed through models, read by `RadixAttention`. It must not be kept after the
forward: a draft and its target run with different back ends in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, Plan


@dataclass(slots=True)
class ForwardContext:
    """One forward: its batch, and a back end with the plan that it filled for the batch.

    A replica that is idle has no attention and no plan.
    """

    batch: ForwardBatch
    attn_backend: AttentionBackend
    plan: Plan | None

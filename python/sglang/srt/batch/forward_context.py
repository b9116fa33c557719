"""Owns what a forward hands down to every layer: the batch and the attention back end that planned it.

Built by the model runner, passed through models, read by `RadixAttention`. It must not be kept after the
forward: a draft and its target run with different back ends in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


@dataclass(slots=True)
class ForwardContext:
    """One forward: its batch, and a back end whose `init_forward_metadata(batch)` has run."""

    batch: ForwardBatch
    attn_backend: AttentionBackend

"""Owns the two ends of the vocabulary: the embedding table and the head that scores every token.

Read by models and the logits processor. The table stays row-major because rows are looked up in it; the
head's stored form belongs to its linear method. A tied head reads the table and has no tensor of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed.communication_op import (
    attention_tensor_parallel_all_reduce,
    tensor_model_parallel_all_gather,
)
from sglang.srt.layers.linear import axis_place
from sglang.srt.layers.parameter import LoadableParameter, Place
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod


class VocabParallelEmbedding(nn.Module):
    """ids [rows] -> [rows, hidden]; the rows of the table are cut over the attention-TP group."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        rank, self.width = axis_place("attn_tp")
        place = Place.shard(f"{name}.weight", (vocab_size, hidden_size), dim=0, rank=rank, size=self.width)
        self.first_id = place.source_start
        self.weight = LoadableParameter(torch.empty(place.length, hidden_size, dtype=dtype), [place])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.width == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first_id
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return attention_tensor_parallel_all_reduce(rows.masked_fill_(foreign[:, None], 0))


class ParallelLMHead(nn.Module):
    """hidden [rows, hidden] -> float32 logits [rows, vocab]; the vocabulary is cut over the TP group."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        rank, self.width = axis_place("tp")
        self.vocab_size = vocab_size
        self.method = UnquantizedLinearMethod()
        if tied_to is None:
            place = Place.shard(
                f"{name}.weight", (vocab_size, hidden_size), dim=0, rank=rank, size=self.width
            )
            self.method.create_weights(self, (place.length, hidden_size), [place], dtype)
            return
        if self.width != tied_to.width:
            raise ValueError(
                f"{name}: a tied head of width {self.width} cannot read an embedding of width "
                f"{tied_to.width}; serve this model without attention data parallelism"
            )
        self.stored = None
        table = tied_to.weight
        table.on_filled = lambda: self.method.pack_shared(self, table.data)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.method.apply(self, hidden, None).float()
        return logits if self.width == 1 else tensor_model_parallel_all_gather(logits, dim=-1)

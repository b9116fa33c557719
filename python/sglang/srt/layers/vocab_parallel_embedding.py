"""Owns the two ends of the vocabulary: the embedding table and the head that scores every token.

Read by models and the logits processor. The head's stored form belongs to its linear method. A tied head that
is cut like the table holds the numbers of both, where its method allows it: rows are looked up in its stored
form if that gives rows, else in the row-major weight. Where the vocabulary does not divide, shares are
padded; no padded id is looked up, scored or listed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.compiled_for import kernels_for
from sglang.srt.distributed.communication_op import (
    attention_tensor_parallel_all_gather,
    attention_tensor_parallel_all_reduce,
    tensor_model_parallel_all_gather,
)
from sglang.srt.layers.linear import Axis, axis_place
from sglang.srt.layers.quantization.base_config import LinearMethod, StoredWeight
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.weights.head_share import AxisShare
from sglang.srt.layers.weights.parameter import LoadableParameter, Place


class VocabParallelEmbedding(nn.Module):
    """ids [rows] -> [rows, hidden]; the rows of the table are cut over the attention-TP group."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.width = axis_place("attn_tp")
        self.tensor_name = f"{name}.weight"
        share = AxisShare.even(vocab_size, self.rank, self.width)
        place = Place(self.tensor_name, (vocab_size, hidden_size), 0, 0, share)
        self.first_id = share.start
        self.hidden_size, self.dtype = hidden_size, dtype
        self.weight = LoadableParameter(torch.empty(share.room, hidden_size, dtype=dtype), [place])
        #: The stored form of the tied head that holds the numbers, once it is loaded.
        self.form_of_head: Callable[[], StoredWeight] | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.width == 1:
            return self._rows(input_ids)
        return attention_tensor_parallel_all_reduce(self._rows(input_ids))

    def _rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's share; zeros for the ids of other ranks."""
        table, is_share = self.weight, self.width > 1
        form = None if self.form_of_head is None else self.form_of_head()
        if form is not None and form.has_rows:
            out = input_ids.new_empty(input_ids.shape[0], self.hidden_size, dtype=self.dtype)
            return form.rows(input_ids.contiguous(), out, self.first_id, is_share)
        kernels = kernels_for(table)
        if kernels is not None:
            out = table.new_empty(input_ids.shape[0], table.shape[1])
            rows: torch.Tensor = kernels.embedding.embed_rows(
                input_ids.contiguous(), table, out, self.first_id, is_share
            )
            return rows
        if not is_share:
            return F.embedding(input_ids, table)
        local = input_ids - self.first_id
        foreign = (local < 0) | (local >= table.shape[0])
        return F.embedding(local.masked_fill(foreign, 0), table).masked_fill_(foreign[:, None], 0)


class ParallelLMHead(nn.Module):
    """hidden [rows, hidden] -> float32 logits [rows, vocab].

    The vocabulary is cut over the group of `axis`, whose ranks must all bring the same rows. `vocab_size` may
    be lowered later to the ids that a token stands for. A tied head that cannot share its numbers with the
    table holds its own part of the same checkpoint tensor.
    """

    weight: LoadableParameter
    stored: StoredWeight

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tied_to: VocabParallelEmbedding | None = None,
        axis: Axis = "tp",
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.width = rank, _ = axis_place(axis)
        self.axis = axis
        self.vocab_size = vocab_size
        method = method or UnquantizedLinearMethod()
        is_cut_alike = tied_to is not None and (rank, self.width) == (tied_to.rank, tied_to.width)
        tensor_name = f"{name}.weight" if tied_to is None else tied_to.tensor_name
        share = AxisShare.even(vocab_size, rank, self.width)
        place = Place(tensor_name, (vocab_size, hidden_size), 0, 0, share)
        self.columns = share.room * self.width
        is_table = is_cut_alike and method.shares_table
        method.create_weights(self, (share.room, hidden_size), [place], dtype, is_table=is_table)
        if tied_to is not None and is_table:
            tied_to.weight = self.weight
            tied_to.form_of_head = lambda: self.stored

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.stored.scores(hidden)
        if self.width > 1 and self.axis == "tp":
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        elif self.width > 1:
            logits = attention_tensor_parallel_all_gather(logits, dim=-1)
        if logits.shape[-1] != self.columns:
            raise RuntimeError(
                f"the head is cut over {self.width} ranks, which have {self.columns} columns together, and "
                f"{logits.shape[-1]} were gathered: it runs over another group than the one it was built for"
            )
        return logits if logits.shape[-1] == self.vocab_size else logits[:, : self.vocab_size]

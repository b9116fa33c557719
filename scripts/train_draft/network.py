"""Owns the EAGLE3 draft network as pure functions of its tensors, under the names of the public format.

Read by the loss, the evaluation and the tests; nothing else computes with a draft's weights here. It must not
know about optimisers, files or text.

Row p of a draft combines the target's features at position p with the embedding of token p + 1, has the
rotary position p and predicts token p + 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from train_draft.target import rms_norm, rope_table, rotate


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What the tensors of a draft follow from; `feature_size` is the width of all captured pieces."""

    hidden_size: int
    feature_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of everything that is trained."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "fc.weight": (hidden, self.feature_size),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, q),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.mlp.gate_proj.weight": (self.intermediate_size, hidden),
            "midlayer.mlp.up_proj.weight": (self.intermediate_size, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, self.intermediate_size),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }


class KeysValues(NamedTuple):
    """Keys and values, each [batch, rows, kv heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def at(self, rows: Tensor) -> KeysValues:
        """Other rows: `rows` [batch, n] -> [batch, n, kv heads, head_dim]."""
        index = rows[:, :, None, None].expand(-1, -1, *self.keys.shape[2:])
        return KeysValues(self.keys.gather(1, index), self.values.gather(1, index))


class DraftNetwork:
    """The network with one set of weights, over rows in any leading shape."""

    def __init__(self, shape: DraftShape, weights: Mapping[str, Tensor], embedding: Tensor) -> None:
        """`embedding` [vocab, hidden] is the target's, and it is not trained."""
        self.shape = shape
        self.weights = weights
        self.embedding = embedding

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.shape.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's captured features [..., F] as the layer's first stream [..., H]."""
        return self._linear("fc", features)

    def layer_inputs(self, ids: Tensor, stream: Tensor) -> Tensor:
        """What attention reads [..., 2H]: the normed embedding of the next token, then the normed stream."""
        embedded = F.embedding(ids, self.embedding)
        pieces = self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", stream)
        return torch.cat(pieces, dim=-1)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[..., heads, head_dim] with the rotary `positions` [...] applied."""
        return self._turned(self._linear("midlayer.self_attn.q_proj", inputs), positions)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> KeysValues:
        """Keys (turned) and values of the same rows."""
        values = self._linear("midlayer.self_attn.v_proj", inputs)
        return KeysValues(
            self._turned(self._linear("midlayer.self_attn.k_proj", inputs), positions),
            values.unflatten(-1, (-1, self.shape.head_dim)),
        )

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        length = int(positions.max()) + 1 if positions.numel() else 1
        tables = rope_table(length, self.shape.head_dim, self.shape.rope_theta)
        cos, sin = (table[positions].unsqueeze(-2) for table in tables)
        return rotate(x.unflatten(-1, (-1, self.shape.head_dim)), cos, sin)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The layer's rest: [..., H], before the last norm. It is also what the next step starts from."""
        stream = stream + self._linear("midlayer.self_attn.o_proj", attended)
        normed = self._norm("midlayer.post_attention_layernorm", stream)
        gate, up = (
            self._linear("midlayer.mlp.gate_proj", normed),
            self._linear("midlayer.mlp.up_proj", normed),
        )
        return stream + self._linear("midlayer.mlp.down_proj", F.silu(gate) * up)

    def scored(self, stream: Tensor) -> Tensor:
        """What the head reads: the stream after the last norm."""
        return self._norm("norm", stream)

    def logits(self, stream: Tensor) -> Tensor:
        """Scores of the draft vocabulary [..., draft_vocab] in fp32."""
        return self._linear("lm_head", self.scored(stream)).float()


def attend(queries: Tensor, prefix: KeysValues, visible: Tensor, own: Sequence[KeysValues]) -> Tensor:
    """Attention of draft rows over what was committed and over their own ancestors: [batch, rows, H].

    `queries` [batch, rows, heads, head_dim]; `prefix` holds the rows that were computed from true features,
    and `visible` [batch, rows, prefix rows] says which of them a row sees. Each of `own` has one key for each
    row: its ancestor at one depth, itself last.
    """
    batch, rows, heads, head_dim = queries.shape
    kv_heads = prefix.keys.shape[2]
    # [batch, kv heads, group, rows, head_dim]
    q = queries.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    flat = q.flatten(2, 3)
    keys, values = prefix.keys.transpose(1, 2), prefix.values.transpose(1, 2)
    scores = torch.matmul(flat, keys.transpose(-1, -2)).float().view(*q.shape[:-1], keys.shape[2])
    parts = [scores.masked_fill(~visible[:, None, None], float("-inf"))]
    for one in own:
        own_keys = one.keys.transpose(1, 2)[:, :, None].float()  # [batch, kv heads, 1, rows, head_dim]
        parts.append((q.float() * own_keys).sum(-1, keepdim=True))
    weights = (torch.cat(parts, dim=-1) * head_dim**-0.5).softmax(-1)
    shared = weights[..., : keys.shape[2]].to(values.dtype).flatten(2, 3)
    out = torch.matmul(shared, values).view(q.shape).float()
    for depth, one in enumerate(own):
        weight = weights[..., keys.shape[2] + depth, None]
        out = out + weight * one.values.transpose(1, 2)[:, :, None].float()
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim).to(queries.dtype)

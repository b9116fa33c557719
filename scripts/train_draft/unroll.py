"""Owns the training-time test: what a draft computes for a whole text, several steps deep, at once.

Read by the loss (with gradients) and by the evaluation (without). It must not know labels or weights' origin.

Unroll k of row p stands for the (k + 1)-th draft step of a round whose newest row is p, the k tokens before
it all accepted: it embeds token p + 1 + k, starts from the stream of unroll k - 1 of the same row (from the
fused features for k = 0), has the rotary position p + k, and sees the rows 0..p of unroll 0 and its own row
of unrolls 1..k. It predicts token p + 2 + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train_draft.network import DraftNetwork, KeysValues, attend
from train_draft.texts import Text, as_ids


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What one unroll made of the texts, row after row and text after text.

    `stream` [rows, H] is before the last norm; `lengths` says how many rows each text has: its rows
    prompt_len - 1, prompt_len, ... in order.
    """

    stream: Tensor
    lengths: list[int]


def num_rows(text: Text, depth: int) -> int:
    """Rows of a text at unroll `depth` whose embedded token the target has read.

    They are rows prompt_len - 1 .. n - 3 - depth of a text of n tokens: the target's opinion on the
    predicted token is known.
    """
    return max(0, text.num_new - 1 - depth)


@dataclass(frozen=True, slots=True)
class Prefixed:
    """The first unroll of some texts, with the keys and values of all their rows, prompt included."""

    first: Unrolled
    prefixes: list[KeysValues]  # each [1, rows of the text, kv heads, head_dim]


def first_unroll(network: DraftNetwork, texts: Sequence[Text]) -> Prefixed:
    """Unroll 0. Rows of the prompt are only fused and keyed: nothing asks for what they predict."""
    dtype = network.weights["fc.weight"].dtype
    # The last row would embed the last token, which the target never read.
    counts = [len(text.ids) - 2 for text in texts]
    starts = [text.prompt_len - 1 for text in texts]
    lengths = [num_rows(text, 0) for text in texts]
    fused = network.fuse(torch.cat([text.features[:-1] for text in texts]).to(dtype))
    inputs = network.layer_inputs(torch.cat([text.ids[1:-1] for text in texts]), fused)
    positions = torch.cat([torch.arange(count) for count in counts])
    known = network.keys_values(inputs, positions)
    prefixes = [
        KeysValues(keys[None], values[None])
        for keys, values in zip(known.keys.split(counts), known.values.split(counts))
    ]
    offsets = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
    asked = torch.cat(
        [torch.arange(length) + offset + start for offset, start, length in zip(offsets, starts, lengths)]
    )
    queries = network.queries(inputs[asked], positions[asked])
    attended = _attend_all(queries, starts, lengths, prefixes, [])
    return Prefixed(Unrolled(network.finish(fused[asked], attended), lengths), prefixes)


def unroll(network: DraftNetwork, texts: Sequence[Text], depth: int) -> list[Unrolled]:
    """Unrolls 0 .. depth - 1 of the texts."""
    prefixed = first_unroll(network, texts)
    starts = [text.prompt_len - 1 for text in texts]
    unrolled = [prefixed.first]
    own: list[list[KeysValues]] = []
    for step in range(1, depth):
        before = unrolled[-1]
        lengths = [num_rows(text, step) for text in texts]
        pieces = [part[:length] for part, length in zip(before.stream.split(before.lengths), lengths)]
        stream = torch.cat(pieces)
        ids, positions = [], []
        for text, start, length in zip(texts, starts, lengths):
            positions.append(torch.arange(start + step, start + step + length))
            ids.append(text.ids[positions[-1] + 1])
        inputs, places = network.layer_inputs(torch.cat(ids), stream), torch.cat(positions)
        known = network.keys_values(inputs, places)
        own.append(
            [
                KeysValues(keys[None], values[None])
                for keys, values in zip(known.keys.split(lengths), known.values.split(lengths))
            ]
        )
        attended = _attend_all(network.queries(inputs, places), starts, lengths, prefixed.prefixes, own)
        unrolled.append(Unrolled(network.finish(stream, attended), lengths))
    return unrolled


def _attend_all(
    queries: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[KeysValues],
    own: Sequence[Sequence[KeysValues]],
) -> Tensor:
    """Text by text: texts differ in length, and none sees another."""
    outputs = []
    for index, part in enumerate(queries.split(list(lengths))):
        start, length, prefix = starts[index], lengths[index], prefixes[index]
        rows = torch.arange(start, start + length)
        visible = torch.arange(prefix.keys.shape[1]) <= rows[:, None]
        deeper = [KeysValues(known[index].keys[:, :length], known[index].values[:, :length]) for known in own]
        outputs.append(attend(part[None], prefix, visible[None], deeper)[0])
    return torch.cat(outputs)


def predicted_positions(texts: Sequence[Text], unrolled: Unrolled, step: int) -> list[Tensor]:
    """For each text the places of the tokens that its rows predict at unroll `step`."""
    return [
        as_ids(range(text.prompt_len + 1 + step, text.prompt_len + 1 + step + length))
        for text, length in zip(texts, unrolled.lengths)
    ]

"""Owns a generated text with its captures, and the shard files that hold them.

Written by generation, read by the draft vocabulary, training and evaluation. It must not know the network.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from train_draft.prompts import Kind

LOOP_GRAM = 4
LOOP_LIMIT = 4  # how often a gram may stand in a continuation


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its continuation.

    `ids` [n] int64 holds both; `features` [n - 1, F] and `final` [n - 1, H] are what the target left at
    positions 0..n-2 (the last token was never read). `index` is the prompt's place in its run.
    """

    index: int
    kind: Kind
    prompt_len: int
    ids: Tensor
    features: Tensor
    final: Tensor

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class TextCount:
    """Kept texts with the tokens of their continuations, and the loops that were dropped."""

    kept: int
    dropped: int
    tokens: int


class LoopFilter:
    """Says when a continuation has become a loop: some 4-gram stands in it for the fifth time."""

    def __init__(self) -> None:
        self._recent: tuple[int, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def is_loop(self, token: int) -> bool:
        """Takes the next token of the continuation."""
        self._recent = (*self._recent, token)[-LOOP_GRAM:]
        if len(self._recent) < LOOP_GRAM:
            return False
        self._counts[self._recent] += 1
        return self._counts[self._recent] > LOOP_LIMIT


class TextStore:
    """The shards of one run in a folder, each written whole or not at all: a run may be killed anywhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, texts: Sequence[Text], dropped: Sequence[int]) -> None:
        """One more shard. `dropped` are the prompts whose texts were loops."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for text in texts:
            for name in ("ids", "features", "final"):
                tensors[f"{text.index}.{name}"] = getattr(text, name).contiguous()
        rows = [[text.index, text.kind, text.prompt_len] for text in texts]
        path = self.folder / f"shard-{len(self._shards()):05d}.safetensors"
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, {"texts": json.dumps(rows), "dropped": json.dumps(list(dropped))})
        os.replace(unfinished, path)

    def done(self) -> tuple[set[int], set[int]]:
        """Indices of the prompts whose texts are kept, and of those that were dropped."""
        kept: set[int] = set()
        dropped: set[int] = set()
        for path in self._shards():
            with safe_open(path, framework="pt") as shard:
                kept |= {row[0] for row in json.loads(shard.metadata()["texts"])}
                dropped |= set(json.loads(shard.metadata()["dropped"]))
        return kept, dropped

    def count(self) -> TextCount:
        """The size of the run so far."""
        kept, dropped = self.done()
        return TextCount(len(kept), len(dropped), sum(text.num_new for text in self.read()))

    def read(self) -> list[Text]:
        """All kept texts, in the order of their prompts."""
        texts = []
        for path in self._shards():
            with safe_open(path, framework="pt") as shard:
                for index, kind, prompt_len in json.loads(shard.metadata()["texts"]):
                    parts = [shard.get_tensor(f"{index}.{name}") for name in ("ids", "features", "final")]
                    texts.append(Text(index, kind, prompt_len, *parts))
        return sorted(texts, key=lambda text: text.index)

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))


def as_ids(ids: Sequence[int]) -> Tensor:
    """Token ids as the int64 tensor that everything here computes with."""
    return torch.tensor(list(ids), dtype=torch.int64)

"""Owns the drafts of speculative cells: their shapes, their files, and what arithmetic needs to know of them.

Read by `layout_lab`. A random draft is hardly ever right, the oracle (the target's own weights) always is.
It must not know layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang.test.lab.arithmetic import ModelShape
from sglang.test.lab.round_arithmetic import DraftWork, HeadShape
from sglang.test.tiny_drafts import write_random_draft

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16
#: Tokens of a reduced vocabulary, which no width divides.
_OWN_VOCAB = 101
#: Texts of the scenario are shorter than that.
_CONTEXT = 512


@dataclass(frozen=True)
class LabDraft:
    """One way to draft. `is_reduced`: an EAGLE3 draft that knows only some of the target's tokens."""

    algorithm: Literal["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"]
    is_tree: bool = False
    is_reduced: bool = False

    @property
    def name(self) -> str:
        kind = "oracle " if self.is_oracle else "reduced " if self.is_reduced else ""
        return f"{self.algorithm} {kind}{'tree' if self.is_tree else 'chain'}"

    @property
    def is_oracle(self) -> bool:
        return self.algorithm == "STANDALONE"

    @property
    def is_random(self) -> bool:
        return self.algorithm in ("EAGLE", "EAGLE3")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(steps, branches, nodes). The tree of the oracle is whole, so that no right token is left out."""
        if not self.is_tree:
            return 3, 1, 4
        return (2, 2, 7) if self.is_oracle else (3, 2, 6)

    @property
    def most_accepted(self) -> int:
        """Tokens that a round gives when everything proposed is right."""
        return self.shape[0] + 1

    def fields(self, target: Path) -> dict[str, Any]:
        """What is published beside the target in folder `target`; writes a draft where there is none."""
        steps, topk, nodes = self.shape
        fields: dict[str, Any] = {
            "speculative_algorithm": self.algorithm,
            "speculative_num_draft_tokens": nodes,
        }
        if self.algorithm == "NGRAM":
            return fields | {"speculative_ngram_max_bfs_breadth": 10 if self.is_tree else 1}
        path = target if self.is_oracle else self._written(target)
        return fields | {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_draft_model_path": str(path),
        }

    def _written(self, target: Path) -> Path:
        folder = target.with_name(f"{target.name}-{self.algorithm}{'-reduced' if self.is_reduced else ''}")
        if not folder.exists():
            write_random_draft(
                folder,
                target,
                "eagle3" if self.algorithm == "EAGLE3" else "eagle",
                draft_vocab_size=_OWN_VOCAB if self.is_reduced else None,
                num_heads=_HEADS,
                num_kv_heads=_KV_HEADS,
                max_position_embeddings=_CONTEXT,
            )
        return folder

    def work(self, target: ModelShape) -> DraftWork:
        """What arithmetic needs to know."""
        steps, topk, nodes = self.shape
        if self.algorithm == "NGRAM":
            return DraftWork(nodes)
        if self.is_oracle:
            return DraftWork(nodes, levels=(1, *[topk] * (steps - 1)), model=target)
        is_third = self.algorithm == "EAGLE3"
        head = HeadShape(is_third, _HEADS, _KV_HEADS, _HEAD_DIM, _OWN_VOCAB if self.is_reduced else None)
        return DraftWork(nodes, levels=(topk,) * (steps - 1), model=head, works_in_one_group=is_third)

"""Owns the speculative cells of the layout lab: which layouts, models and drafts are proven together.

Read by the proof of drafts, which runs `pairwise_cells`. `python -m sglang.test.lab.draft_matrix` runs the
whole product, or those of its cells whose names hold all the given words. It must not judge.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sglang.test.lab.arithmetic import Layout
from sglang.test.lab.drafts import LabDraft
from sglang.test.lab.layout_lab import MODELS, Cell, LayoutLab
from sglang.test.pairwise import pairwise

LAYOUTS = (
    Layout(tp_size=2),
    Layout(tp_size=2, attn_dp_size=2),
    Layout(tp_size=4, attn_dp_size=2),
    Layout(tp_size=4, attn_dp_size=2, dp_lm_head=True),
    Layout(tp_size=1, num_worlds=2),
)
#: What drafts, as chain and as tree.
DRAFTS = (
    (LabDraft("EAGLE"), LabDraft("EAGLE", is_tree=True)),
    (LabDraft("EAGLE3"), LabDraft("EAGLE3", is_tree=True)),
    (LabDraft("EAGLE3", is_reduced=True), LabDraft("EAGLE3", is_reduced=True, is_tree=True)),
    (LabDraft("STANDALONE"), LabDraft("STANDALONE", is_tree=True)),
    (LabDraft("NGRAM"), LabDraft("NGRAM", is_tree=True)),
)


def all_cells() -> list[Cell]:
    """The whole product, the cells of a layout together."""
    return [
        Cell(layout, model, draft=draft)
        for layout in LAYOUTS
        for drafts in DRAFTS
        for draft in drafts
        for model in MODELS
    ]


def pairwise_cells() -> list[Cell]:
    """Every layout with every draft, each of them as chain and tree and with both models."""
    chosen = pairwise(LAYOUTS, DRAFTS, ("chain", "tree"), MODELS)
    return [Cell(LAYOUTS[a], MODELS[m], draft=DRAFTS[d][shape]) for a, d, shape, m in chosen]


def main(words: list[str]) -> int:
    """Run cells and print one line each; 1 if one failed, 2 if there is none of such a name."""
    cells = [cell for cell in all_cells() if all(word in cell.name for word in words)]
    if not cells:
        print(f"no cell's name holds all of {', '.join(words)}; names are like '{all_cells()[0].name}'")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as folder, LayoutLab(Path(folder)) as lab:
        for cell in cells:
            result = lab.run(cell)
            failed += not result.passed
            print(f"{'ok' if result.passed else 'FAILED':6} {result.line()}", flush=True)
            if not result.passed:
                print(result.text(), flush=True)
    print(f"{len(cells) - failed} of {len(cells)} cells passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

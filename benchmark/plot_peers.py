"""Draws what benchmark/bench_peers.py wrote with --json: each row as bars, ours and the peers', with ranges.

Usage: python benchmark/plot_peers.py peers.json docs/peers.svg. Needs matplotlib, which the engine does not.
Rows that are not valid are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLUMNS = 2
OURS = {"4-bit": "#08519c", "int8": "#2171b5", "bf16": "#4292c6", "fp32": "#9ecae1"}
THEIRS = {"4-bit": "#636363", "int8": "#969696", "bf16": "#bdbdbd", "fp32": "#d9d9d9"}


def bars(written: dict[str, Any], row: str) -> list[tuple[str, str, list[float]]]:
    """Name, color and values of each side that has valid samples of this row."""
    found = []
    for name, side in written["sides"].items():
        samples = side["samples"].get(row, [])
        if not samples or any(sample["fault"] for sample in samples):
            continue
        label = written["labels"][name]
        colors = OURS if label["is_ours"] else THEIRS
        found.append((name, colors[label["form"]], [sample["value"] for sample in samples]))
    return found


def draw(written: dict[str, Any]) -> plt.Figure:
    rows = [row for row in written["units"] if bars(written, row)]
    lines = -(-len(rows) // COLUMNS)
    tall = max(len(bars(written, row)) for row in rows)
    figure, axes = plt.subplots(lines, COLUMNS, figsize=(10, lines * (0.6 + 0.2 * tall)), squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows):
        sides = bars(written, row)
        for place, (_, color, values) in enumerate(sides):
            middle = statistics.median(values)
            reach = [[middle - min(values)], [max(values) - middle]]
            axis.barh(place, middle, color=color, xerr=reach, error_kw={"lw": 0.8})
        axis.set_title(f"{row}, {written['units'][row]}", fontsize=9)
        axis.set_yticks(range(len(sides)), [name for name, _, _ in sides])
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="what bench_peers.py wrote")
    parser.add_argument("picture", type=Path, help="the .svg file to write")
    options = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "peers"  # the same figures make the same file
    plt.rcParams["svg.fonttype"] = "none"  # text, not outlines: smaller, and it can be searched
    figure = draw(json.loads(options.figures.read_text(encoding="utf-8")))
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()

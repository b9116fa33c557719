"""From samples to the tables: medians with ranges, ratios to the best peer, rows that are not valid.

Owns every figure that is printed. Read by the command and by the plot. It must not measure anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peers.side import Label
from peers.turns import Results
from peers.workloads import Sample

#: Ratios to the best peer in the same form that we want to reach, by the beginning of a row's name. A form of
#: its own comes before "any"; of rows that are not here we only say where we stand.
GOALS = {
    ("decode", "4-bit"): 2.0,
    ("decode", "int8"): 1.6,
    ("decode", "bf16"): 1.2,
    ("prefill", "any"): 1.0,
    ("prefill", "int8"): 1.2,
    ("prefill", "4-bit"): 1.2,
    ("served", "any"): 1.5,
    ("shared", "any"): 1.3,
}
#: Of a draft over the same form without one.
GOAL_OF_A_DRAFT = 2.5


@dataclass(frozen=True)
class Cell:
    """The samples of one side in one row."""

    values: tuple[float, ...]
    more: dict[str, float]
    fault: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if self.fault:
            return f"INVALID: {self.fault}"
        shown = " / ".join(f"{value:.0f}" for value in self.more.values())
        return spread(self.values) + (f", {shown} ms" if shown else "")


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Median and range."""
    if digits is None:
        digits = 0 if statistics.median(values) >= 100 else 1
    low, middle, high = (
        f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}..{high}]" if len(values) > 1 else middle


def cell(samples: Sequence[Sample]) -> Cell:
    """One short turn spoils the row: its figures would not be those of the same work."""
    faults = [sample.fault for sample in samples if sample.fault]
    names = samples[0].more if not faults else {}
    more = {name: statistics.median(sample.more[name] for sample in samples) for name in names}
    return Cell(
        tuple(sample.value for sample in samples), more, faults[0].replace("|", "/") if faults else ""
    )


def cells(results: Results, row: str) -> dict[str, Cell]:
    return {name: cell(found.samples[row]) for name, found in results.items() if row in found.samples}


def goal(row: str, form: str) -> float | None:
    kind = row.split()[0].rstrip(",")
    return GOALS.get((kind, form), GOALS.get((kind, "any")))


def row_names(results: Results) -> list[str]:
    return list(dict.fromkeys(row for found in results.values() for row in found.samples))


def figures(results: Results, units: dict[str, str]) -> list[str]:
    """All medians and ranges, one line a row and one column a side."""
    sides = list(results)
    lines = [f"| row | {' | '.join(sides)} |", "|---" * (len(sides) + 1) + "|"]
    for row in row_names(results):
        found = cells(results, row)
        shown = [str(found[side]) if side in found else "-" for side in sides]
        lines.append(f"| {row} ({units.get(row, '')}) | {' | '.join(shown)} |")
    ready = [f"{found.ready_s:.1f} s" for found in results.values()]
    memory = [
        f"{found.memory_at_start / 1e9:.2f} / {found.memory_after / 1e9:.2f} GB" for found in results.values()
    ]
    return [
        *lines,
        f"| ready after | {' | '.join(ready)} |",
        f"| memory, start / end | {' | '.join(memory)} |",
    ]


@dataclass(frozen=True)
class Ratio:
    """Ours over a peer, round by round."""

    row: str
    ours: str
    peer: str
    values: tuple[float, ...]
    goal: float | None
    same_form: bool

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def over(ours: Cell, theirs: Cell) -> tuple[float, ...]:
    """Round by round, because the two of a round ran one after the other."""
    return tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True))


def ratios(results: Results, labels: dict[str, Label]) -> list[Ratio]:
    """Each of our sides beside the best peer in its form, and the best of all where that is another."""
    found = []
    for row in row_names(results):
        valid = {name: it for name, it in cells(results, row).items() if not it.fault}
        peers = {name: it for name, it in valid.items() if not labels[name].is_ours}
        for name, own in valid.items():
            if not labels[name].is_ours:
                continue
            form = labels[name].form
            if labels[name].speculates:
                found += [
                    Ratio(row, name, plain, over(own, valid[plain]), GOAL_OF_A_DRAFT, True)
                    for plain in valid
                    if labels[plain].is_ours and labels[plain].form == form and not labels[plain].speculates
                ]
            alike = [peer for peer in peers if labels[peer].form == form]
            best = [
                max(group, key=lambda peer: peers[peer].median) for group in (alike, list(peers)) if group
            ]
            for peer in dict.fromkeys(best):
                same = peer in alike
                wanted = goal(row, form) if same or not alike else None
                found.append(Ratio(row, name, peer, over(own, peers[peer]), wanted, same))
    return found


def ratio_lines(found: Sequence[Ratio]) -> list[str]:
    lines = ["| row | ours | beside | ratio | to reach |", "|---|---|---|---|---|"]
    for it in found:
        peer = it.peer if it.same_form else f"{it.peer} (another form)"
        wanted = "-" if it.goal is None else f"{it.goal:.1f}"
        lines.append(f"| {it.row} | {it.ours} | {peer} | {spread(it.values, 2)} | {wanted} |")
    return lines

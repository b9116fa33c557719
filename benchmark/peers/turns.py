"""Who measures when: the sides take turns in every row, so that a busy minute hits all of them.

Owns the order, the warm-up and what becomes of a side that fails. Read by the command. It must not know how a
side answers or how a figure is printed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from peers.side import Side
from peers.workloads import Prompts, Row, Sample

Say = Callable[[str], None]


@dataclass
class Measured:
    """All of one side: seconds to ready, memory in bytes, and samples of each row by name."""

    ready_s: float
    memory_at_start: int
    memory_after: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)


Results = dict[str, Measured]


@contextmanager
def started(sides: Sequence[Side], say: Say) -> Iterator[dict[str, tuple[Side, Measured]]]:
    """Start the sides one after another; all are stopped at the end, whatever happened."""
    with ExitStack() as stack:
        running: dict[str, tuple[Side, Measured]] = {}
        for side in sides:
            stack.callback(side.stop)  # before the start, which may fail halfway
            try:
                ready_s = side.start()
            except (RuntimeError, OSError) as error:
                side.stop()
                say(f"{side.label.name}: left out, it did not start: {error}")
                continue
            memory = side.memory_bytes()
            say(f"{side.label.name}: ready after {ready_s:.1f} s, {memory / 1e9:.2f} GB")
            running[side.label.name] = side, Measured(ready_s, memory)
        yield running


def measure(
    sides: Sequence[Side],
    rows: Sequence[Row],
    prompts: Prompts,
    *,
    repeat: int,
    seed: int,
    say: Say,
    between: Callable[[], None] = lambda: None,
) -> Results:
    """One warm-up of each side, then each row `repeat` times, round by round: A B, B A, A B ...

    In a round every side gets the same prompts; no two rounds share one. A side that fails in a row has
    samples with that fault and goes on with the next row. `between` is called before each row.
    """
    with started(sides, say) as running:
        draw = random.Random(seed)
        for side, _ in running.values():
            side.answer([prompts.make(256, draw)] * min(4, side.label.at_most), 16, 4)
        for row in rows:
            between()
            admitted = [pair for pair in running.values() if row.admits(pair[0].label)]
            for number in range(repeat):
                round_seed = draw.randrange(2**32)
                for side, measured in admitted if number % 2 == 0 else reversed(admitted):
                    samples = _turn(side, row, prompts, random.Random(round_seed), say)
                    for name, sample in zip(row.names, samples, strict=True):
                        measured.samples.setdefault(name, []).append(sample)
                say(f"{row.names[0]}, round {number + 1} of {repeat}: {_latest(admitted, row)}")
        for side, measured in running.values():
            measured.memory_after = side.memory_bytes()
    return {name: measured for name, (_, measured) in running.items()}


def _latest(admitted: Sequence[tuple[Side, Measured]], row: Row) -> str:
    found = []
    for side, measured in admitted:
        values = [measured.samples[name][-1].value for name in row.names]
        found.append(f"{side.label.name} {' and '.join(f'{value:.0f}' for value in values)}")
    return "; ".join(found)


def _turn(side: Side, row: Row, prompts: Prompts, draw: random.Random, say: Say) -> list[Sample]:
    try:
        return row.measure(side, prompts, draw)
    except (RuntimeError, OSError, EOFError, TimeoutError) as error:
        say(f"{side.label.name}: {row.names[0]} failed: {error or type(error).__name__}")
        return [Sample(0.0, fault=str(error) or type(error).__name__) for _ in row.names]

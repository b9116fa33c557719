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
Started = dict[str, tuple[Side, Measured]]


@contextmanager
def started(sides: Sequence[Side], say: Say) -> Iterator[Started]:
    """Start the sides one after another; all are stopped at the end, whatever happened."""
    with ExitStack() as stack:
        running: Started = {}
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
    samples with that fault and goes on with the next row. `between` is called before each row. A run that is
    ended early keeps the rows that were finished.
    """
    with started(sides, say) as running:
        draw = random.Random(seed)
        for side, _ in running.values():
            side.answer([prompts.make(256, draw)] * min(4, side.label.at_most), 16, 4)
        try:
            for row in rows:
                between()
                _take_turns(running, row, prompts, repeat=repeat, draw=draw, say=say)
        except (KeyboardInterrupt, SystemExit):
            if not any(measured.samples for _, measured in running.values()):
                raise
            say("ended early; the rows that were finished follow")
        for side, measured in running.values():
            measured.memory_after = side.memory_bytes()
    return {name: measured for name, (_, measured) in running.items()}


def _take_turns(
    running: Started, row: Row, prompts: Prompts, *, repeat: int, draw: random.Random, say: Say
) -> None:
    """All rounds of one row; its samples are kept only when every round is there."""
    admitted = [pair for pair in running.values() if row.admits(pair[0].label)]
    taken: dict[str, list[list[Sample]]] = {side.label.name: [] for side, _ in admitted}
    for number in range(repeat):
        round_seed = draw.randrange(2**32)
        for side, _ in admitted if number % 2 == 0 else reversed(admitted):
            taken[side.label.name].append(_turn(side, row, prompts, random.Random(round_seed), say))
        say(f"{row.names[0]}, round {number + 1} of {repeat}: {_latest(taken)}")
    for side, measured in admitted:
        for name, samples in zip(row.names, zip(*taken[side.label.name], strict=True), strict=True):
            measured.samples[name] = list(samples)


def _latest(taken: dict[str, list[list[Sample]]]) -> str:
    values = {name: " and ".join(f"{s.value:.0f}" for s in rounds[-1]) for name, rounds in taken.items()}
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _turn(side: Side, row: Row, prompts: Prompts, draw: random.Random, say: Say) -> list[Sample]:
    try:
        return row.measure(side, prompts, draw)
    except (RuntimeError, OSError, EOFError, TimeoutError) as error:
        say(f"{side.label.name}: {row.names[0]} failed: {error or type(error).__name__}")
        return [Sample(0.0, fault=str(error) or type(error).__name__) for _ in row.names]

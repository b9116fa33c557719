"""Owns how many steps a draft takes while the server runs, chosen from how many drafts were accepted.

Asked by the speculative worker before a round and told after it. Must not hold tensors or groups: only
numbers that all ranks of a tensor group have alike may enter, so that all of them choose alike. The
candidates are read in `arg_groups/adaptive_config.py`, the bound on nodes is the largest of them plus one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["AdaptiveSlot", "AdaptiveSteps"]


class AdaptiveSlot(Protocol):
    """What is configured for the batch sizes of one slot."""

    @property
    def candidate_steps(self) -> Sequence[int]:
        """The numbers of steps to choose from; 0 is a round without drafts."""

    @property
    def ema_alpha(self) -> float:
        """Weight of the newest round in the moving average."""

    @property
    def update_interval(self) -> int:
        """Rounds between two choices."""

    @property
    def warmup_batches(self) -> int:
        """Rounds before the first interval begins."""

    @property
    def up_hysteresis(self) -> float:
        """Added to the average that is needed to go up."""

    @property
    def down_hysteresis(self) -> float:
        """Added to the average from which on it goes down."""

    @property
    def ceiling_coeff(self) -> float:
        """Steps for each accepted draft of the average, as an upper limit; 0 for none."""


class AdaptiveSteps:
    """Chooses the steps of each round by the batch size, one `_SlotController` a slot of batch sizes."""

    def __init__(self, slots: Mapping[int, AdaptiveSlot], initial_steps: int) -> None:
        """`slots`: smallest batch size of a slot -> its configuration.

        Each slot starts at `initial_steps`, or at its nearest candidate below, or at its smallest.
        """
        self._bounds = sorted(slots)
        self._controllers = [_SlotController(slots[bound], initial_steps) for bound in self._bounds]

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every number of steps that may be chosen, ascending."""
        return tuple(sorted({steps for one in self._controllers for steps in one.candidates}))

    def steps_for(self, batch_size: int) -> int:
        """The steps that a round of this many requests takes."""
        return self._of(batch_size).steps

    def note_round(self, batch_size: int, correct: Sequence[int]) -> None:
        """Take in a round that ran at `steps_for(batch_size)`: the accepted drafts of each request.

        Not for rounds that were cut short by lack of room; a replica without requests changes nothing.
        """
        if correct:
            self._of(batch_size).note(sum(correct) / len(correct))

    def _of(self, batch_size: int) -> _SlotController:
        """The slot with the largest bound that is not above; the first for batches below all bounds."""
        return self._controllers[max(bisect_right(self._bounds, batch_size) - 1, 0)]


class _SlotController:
    """The moving average of accepted drafts a round, and the steps chosen from it.

    After the warm-up, every `update_interval` rounds (candidates ascending, `below` the one before the
    current):

    - down while average <= below - 0.5 + down_hysteresis, where below = 0 counts as 1;
    - else up while average > current - 0.5 + up_hysteresis;
    - unless that went up, at most max(1, ceil(average * ceiling_coeff)).

    Without steps nothing is observed: the average stands still, and the next choice probes the next
    candidate.
    """

    def __init__(self, slot: AdaptiveSlot, initial_steps: int) -> None:
        self._slot = slot
        self.candidates = sorted(set(slot.candidate_steps))
        self._at = self._index_up_to(initial_steps)
        self._average = max(self.steps - 1.0, 0.0)
        self._num_rounds = 0

    @property
    def steps(self) -> int:
        return self.candidates[self._at]

    def note(self, mean_correct: float) -> None:
        slot = self._slot
        if self.steps > 0:
            self._average += slot.ema_alpha * (mean_correct - self._average)
        self._num_rounds += 1
        rounds = self._num_rounds - slot.warmup_batches
        if rounds > 0 and rounds % slot.update_interval == 0:
            self._at = self._chosen()

    def _chosen(self) -> int:
        """The index of the candidate for the next interval."""
        if self.steps == 0:
            return min(self._at + 1, len(self.candidates) - 1)
        at = self._at
        while at > 0 and self._average <= max(self.candidates[at - 1], 1) - 0.5 + self._slot.down_hysteresis:
            at -= 1
        if at == self._at:
            last = len(self.candidates) - 1
            while at < last and self._average > self.candidates[at] - 0.5 + self._slot.up_hysteresis:
                at += 1
        if at <= self._at and self._slot.ceiling_coeff > 0:
            ceiling = max(1, math.ceil(self._average * self._slot.ceiling_coeff))
            at = min(at, self._index_up_to(ceiling))
        return at

    def _index_up_to(self, steps: int) -> int:
        """The largest candidate that is not above `steps`; the smallest where all are."""
        return max(bisect_right(self.candidates, steps) - 1, 0)

"""Owns whether a round drafts at all: measured, per batch size, against rounds of plain decoding.

Asked by the speculative worker before a round and told after it. It must not read a clock: the times it is
given are those of the attention-TP group's leader, so that all its ranks decide alike.
"""

from __future__ import annotations

#: Rounds for which the other way is tried; the first of them is not measured.
TRIAL_ROUNDS = 3
#: Rounds between two trials: at first, and at most. Each trial that changes nothing doubles them.
FIRST_SPELL, LONGEST_SPELL = 64, 1024
#: Weight of the newest round in the averages.
NEWEST = 0.5


class DraftGate:
    """Drafts pay where a round's tokens for its time exceed those of a plain step.

    Batches of about equal size (the same power of two) share what was measured. They begin with drafts, then
    try without, and keep what was faster until the next trial.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Measured] = {}
        self._last: tuple[int, bool] | None = None  # the round before, where nothing came between
        self._last_end = 0.0

    def drafts(self, batch_size: int) -> bool:
        """Whether the next round of so many requests should draft."""
        return self._of(batch_size).drafts

    def note_round(self, end: float, batch_size: int, *, drafted: bool, tokens: float) -> None:
        """A round ended at `end` (seconds) and gave each request so many tokens on average.

        Its time counts from the end of a round of the same kind just before it.
        """
        this = (batch_size, drafted)
        seconds = end - self._last_end if self._last == this else None
        self._last, self._last_end = this, end
        self._of(batch_size).note(drafted, tokens, seconds)

    def interrupt(self) -> None:
        """Something else than a round of this kind ran: the next round's time is not known."""
        self._last = None

    def _of(self, batch_size: int) -> _Measured:
        return self._sizes.setdefault(batch_size.bit_length(), _Measured())


class _Measured:
    """What is known of batches of one size, and which way their rounds go."""

    def __init__(self) -> None:
        self.drafts = True
        self._is_trial = False
        self._left = TRIAL_ROUNDS
        self._spell = FIRST_SPELL
        self._seconds: dict[bool, float] = {}  # of a round, by whether it drafts
        self._tokens = 1.0  # that a round with drafts gives a request

    def note(self, drafted: bool, tokens: float, seconds: float | None) -> None:
        if drafted:
            self._tokens += NEWEST * (tokens - self._tokens)
        if seconds is not None:
            before = self._seconds.get(drafted, seconds)
            self._seconds[drafted] = before + NEWEST * (seconds - before)
        self._left -= 1
        if self._left > 0:
            return
        if self.drafts not in self._seconds:
            self._left = TRIAL_ROUNDS  # batches changed all the time: nothing was measured yet
        elif not self._is_trial:
            self.drafts, self._is_trial, self._left = not self.drafts, True, TRIAL_ROUNDS
        else:
            self._decide()

    def _decide(self) -> None:
        """A trial is over: keep to the faster way for a spell."""
        pays = self._tokens * self._seconds[False] > self._seconds[True]
        changed = pays == self.drafts
        self._spell = FIRST_SPELL if changed else min(2 * self._spell, LONGEST_SPELL)
        self.drafts, self._is_trial, self._left = pays, False, self._spell

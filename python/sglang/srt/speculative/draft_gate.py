"""Owns whether a round drafts at all: measured, per batch size, against rounds of plain decoding.

Asked by the speculative worker before a round and told after it. It must not read a clock: the times it is
given are those of the attention-TP group's leader, so that all its ranks decide alike.
"""

from __future__ import annotations

#: Rounds for which the other way is tried at least; the first of them is not measured.
TRIAL_ROUNDS = 3
#: Answers of a draft that a trial of drafts sees at least, one a request and round: how many of its guesses
#: are right differs much from round to round.
TRIAL_ANSWERS = 24
#: Rounds between two trials that are no longer than they must be: at first, and at most. Each trial that
#: changes nothing makes them longer by so much.
FIRST_SPELL, LONGEST_SPELL, LONGER = 128, 2048, 4
#: Weight of the newest round in the averages of times, and how many times the average a round counts at most:
#: one slow moment decides nothing.
NEWEST, SLOWEST = 0.5, 1.5


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
        self._of(batch_size).note(drafted, tokens, seconds, batch_size)

    def note_nothing_proposed(self, end: float, batch_size: int) -> None:
        """A round that might have drafted found nothing to propose: the next one's time counts from here.

        Where guesses are found now and then, no two rounds with some may follow each other.
        """
        self._last, self._last_end = (batch_size, True), end

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
        self._done = 0  # rounds of this trial or spell
        self._spell = 0  # rounds until the next trial; 0 before the first
        self._seconds: dict[bool, float] = {}  # of a round, by whether it drafts
        self._tokens = 1.0  # that a round with drafts gives a request, over the last answers
        self._answers = 0  # that are in it

    def note(self, drafted: bool, tokens: float, seconds: float | None, batch_size: int) -> None:
        if drafted:
            self._answers = min(self._answers + batch_size, max(TRIAL_ANSWERS, batch_size))
            self._tokens += batch_size / self._answers * (tokens - self._tokens)
        if seconds is not None:
            before = self._seconds.get(drafted, seconds)
            self._seconds[drafted] = before + NEWEST * (min(seconds, SLOWEST * before) - before)
        self._done += 1
        draft_trial = max(TRIAL_ROUNDS, -(-TRIAL_ANSWERS // batch_size))
        trial = draft_trial if self.drafts else TRIAL_ROUNDS
        if self._done < (trial if self._is_trial or self._spell == 0 else self._spell):
            return
        self._done = 0
        if self.drafts not in self._seconds:
            return  # batches changed all the time: nothing was measured yet
        if self._is_trial:
            self._decide(draft_trial)
        else:
            self.drafts, self._is_trial = not self.drafts, True

    def _decide(self, draft_trial: int) -> None:
        """A trial is over: keep to the faster way for a spell, the longer the more another trial costs."""
        pays = self._tokens * self._seconds[False] > self._seconds[True]
        changed = pays == self.drafts
        longer = 1 if pays else -(-draft_trial // TRIAL_ROUNDS)
        first, longest = longer * FIRST_SPELL, longer * LONGEST_SPELL
        self._spell = first if changed else min(max(LONGER * self._spell, first), longest)
        self.drafts, self._is_trial = pays, False

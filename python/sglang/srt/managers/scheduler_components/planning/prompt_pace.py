"""Owns how many prompt tokens a step may take while streams run, so that none of them waits long for a token.

Asked by the batch planner. It must not read a clock: it is given the time of the attention-TP group, the same
on all its ranks, so that they all cut prompts alike.
"""

from __future__ import annotations

#: Seconds that a step with prompts may keep running streams waiting, beside the time of a decode step.
STEP_SECONDS = 0.25
#: Tokens of the first piece, before anything is measured.
FIRST_TOKENS = 128
#: Pieces are no smaller: below, a forward reads the weights for hardly any work.
LEAST_TOKENS = 32
#: A step of fewer tokens tells little of what a token costs (unless pieces are smaller still).
LEAST_MEASURED = 64
#: Weight of the newest step in what is expected of the next one.
NEWEST = 0.5


class PromptPace:
    """Measures steps from the beginning of one to that of the next, in moving averages.

    Between two calls of `begin_step` lies one step: `planned` says what it computes, or nothing did.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._num_tokens = 0  # of the step under way; 0 where it is not to be measured
        self._has_prompt = False
        self._seconds_per_token: float | None = None
        self._decode_seconds = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens the next step may take, decoding requests included."""
        if self._seconds_per_token is None:
            return FIRST_TOKENS
        return max(int((STEP_SECONDS + self._decode_seconds) / self._seconds_per_token), LEAST_TOKENS)

    def begin_step(self, now: float) -> None:
        """A step begins at `now`, in seconds: the one before it is over."""
        seconds, count = now - self._began, self._num_tokens
        if count and not self._has_prompt:
            self._decode_seconds = _average(self._decode_seconds or None, seconds)
        elif count and count >= min(LEAST_MEASURED, self.tokens):
            self._seconds_per_token = _average(self._seconds_per_token, seconds / count)
        self._began, self._num_tokens = now, 0

    def planned(self, num_tokens: int, *, has_prompt: bool) -> None:
        """The step under way computes so many tokens."""
        self._num_tokens, self._has_prompt = num_tokens, has_prompt

    def forget_step(self) -> None:
        """The loop rests after the step under way, so the next beginning does not tell how long it took."""
        self._num_tokens = 0


def _average(before: float | None, newest: float) -> float:
    # A clock too coarse for a step must not lead to pieces without end.
    newest = max(newest, 1e-9)
    return newest if before is None else before + NEWEST * (newest - before)

"""The pace of prompts: pieces follow the measured time a step, and a pause or a tiny step teaches nothing."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

from sglang.srt.managers.scheduler_components.planning.prompt_pace import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    STEP_SECONDS,
    PromptPace,
)


class Steps:
    """A pace and the clock that it is given."""

    def __init__(self) -> None:
        self.pace = PromptPace()
        self.now = 100.0
        self.pace.begin_step(self.now)

    def run(self, num_tokens: int, seconds: float, *, has_prompt: bool = True) -> int:
        """A step of this length; gives the tokens of the next one."""
        self.pace.planned(num_tokens, has_prompt=has_prompt)
        self.now += seconds
        self.pace.begin_step(self.now)
        return self.pace.tokens


def test_the_first_piece_is_a_safe_guess() -> None:
    assert PromptPace().tokens == FIRST_TOKENS


@pytest.mark.parametrize("tokens_a_second", [400, 2500, 30_000])
def test_pieces_settle_at_the_time_of_a_step(tokens_a_second: float) -> None:
    steps = Steps()
    tokens = steps.pace.tokens
    for _ in range(12):
        tokens = steps.run(tokens, 0.02 + tokens / tokens_a_second)
    assert 0.02 + tokens / tokens_a_second == pytest.approx(STEP_SECONDS, rel=0.02)


def test_a_slow_machine_still_gets_pieces_that_are_worth_a_forward() -> None:
    steps = Steps()
    assert [steps.run(steps.pace.tokens, 60.0) for _ in range(5)] == [LEAST_TOKENS] * 5


def test_where_a_decode_step_is_long_a_step_with_prompts_may_be_longer_by_one() -> None:
    steps = Steps()
    before = steps.run(1000, 1.0)
    assert before == STEP_SECONDS * 1000
    assert steps.run(4, 0.5, has_prompt=False) == (STEP_SECONDS + 0.5) * 1000


def test_a_step_that_the_loop_rested_after_is_not_measured() -> None:
    steps = Steps()
    before = steps.run(1000, 1.0)
    steps.pace.planned(1000, has_prompt=True)
    steps.pace.forget_step()
    steps.pace.begin_step(steps.now + 3600)
    assert steps.pace.tokens == before
    steps.pace.begin_step(steps.now + 7200)  # nothing was planned
    assert steps.pace.tokens == before


def test_a_step_of_few_tokens_says_nothing_of_long_ones() -> None:
    steps = Steps()
    before = steps.run(1000, 1.0)
    assert steps.run(5, 0.1) == before


def test_one_disturbed_step_is_forgotten_in_a_few() -> None:
    steps = Steps()
    before = steps.run(1000, 1.0)
    assert steps.run(250, 5.0) < before / 4
    for _ in range(6):
        tokens = steps.run(steps.pace.tokens, steps.pace.tokens / 1000)
    assert tokens > 0.75 * before


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    assert Steps().run(1000, 0.0) > 1000

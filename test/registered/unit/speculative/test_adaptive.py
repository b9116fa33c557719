from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import random
from dataclasses import dataclass

import pytest

from sglang.srt.arg_groups.adaptive_config import DEFAULT_SLOTS, all_candidate_steps
from sglang.srt.speculative.adaptive import AdaptiveSteps


@dataclass(frozen=True)
class Slot:
    """Chooses after every round by that round alone, unless a test says otherwise."""

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 1.0
    update_interval: int = 1
    warmup_batches: int = 0
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0


def one_slot(*candidates, start, **knobs):
    return AdaptiveSteps({1: Slot(candidates, **knobs)}, start)


def after(adaptive, *rounds):
    """The steps after each of these rounds of one request."""
    chosen = []
    for correct in rounds:
        adaptive.note_round(1, [correct])
        chosen.append(adaptive.steps_for(1))
    return chosen


def test_the_largest_slot_that_is_not_above_the_batch_decides():
    adaptive = AdaptiveSteps({8: Slot((1,)), 2: Slot((3,)), 32: Slot((0,))}, 3)
    sizes = {1: 3, 2: 3, 7: 3, 8: 1, 31: 1, 32: 0, 500: 0}
    assert {size: adaptive.steps_for(size) for size in sizes} == sizes


def test_a_slot_starts_at_the_configured_steps_or_the_next_candidate_below():
    slots = {1: Slot((1, 3, 5)), 8: Slot((4, 0, 1)), 32: Slot((5, 7)), 64: Slot((0,))}
    adaptive = AdaptiveSteps(slots, 3)
    assert [adaptive.steps_for(size) for size in slots] == [3, 1, 5, 0]


def test_rounds_by_hand():
    """Averages, from 2: 2.5 | 2.75, 2.875 up | 1.4375, .719 down | .359, .180 down | .590, .795 up."""
    adaptive = one_slot(1, 3, 5, start=3, ema_alpha=0.5, update_interval=2, warmup_batches=1)
    assert after(adaptive, 3, 3, 3) == [3, 3, 5]
    assert after(adaptive, 0, 0) == [5, 3]
    assert after(adaptive, 0, 0) == [3, 1]
    assert after(adaptive, 1, 1) == [1, 3]


def test_the_average_starts_one_below_the_steps_and_not_below_zero():
    """2, then 2.5, 2.75 up; and 0 until the probe, then .5, .75 up."""
    assert after(one_slot(1, 3, 5, start=3, ema_alpha=0.5), 3, 3) == [3, 5]
    assert after(one_slot(0, 1, 3, start=0, ema_alpha=0.5, update_interval=2), 0, 0, 1, 1) == [0, 1, 1, 3]


def test_the_average_is_over_the_requests_of_a_round():
    adaptive = AdaptiveSteps({1: Slot((1, 3, 5))}, 3)
    adaptive.note_round(4, [3, 3, 3, 1])
    assert adaptive.steps_for(4) == 3
    adaptive.note_round(4, [3, 3, 3, 2])
    assert adaptive.steps_for(4) == 5


@pytest.mark.parametrize(
    ("mean", "steps"), [(2.5, 3), (2.51, 5), (0.25, 1), (0.26, 3), (3.0, 5), (4.6, 7), (0.0, 1)]
)
def test_up_needs_more_than_its_limit_and_down_no_more_than_its_own(mean, steps):
    assert after(one_slot(1, 3, 5, 7, start=3), mean) == [steps]


def test_hysteresis_moves_the_limits():
    assert after(one_slot(1, 3, 5, start=3, up_hysteresis=0.3), 2.8, 2.81) == [3, 5]
    assert after(one_slot(1, 3, 5, start=3, down_hysteresis=0.0), 0.51, 0.5) == [3, 1]


def test_one_bad_average_may_go_down_several_candidates():
    assert after(one_slot(0, 1, 3, 7, start=7), 0.0) == [0]
    assert after(one_slot(0, 2, 3, 7, start=7), 1.25) == [2]
    assert after(one_slot(0, 1, 3, 7, start=7), 2.25) == [3]


def test_without_steps_nothing_is_observed_and_the_next_candidate_is_probed():
    adaptive = one_slot(0, 1, 3, start=1, ema_alpha=0.5, update_interval=2)
    assert after(adaptive, 0, 0) == [1, 0]
    # What a round without drafts says is no observation, whatever it is: the average stays at 0.
    assert after(adaptive, 9, 9) == [0, 1]
    assert after(adaptive, 0, 0) == [1, 0]
    assert after(adaptive, 0, 0) == [0, 1]
    # .5, .75: the probe pays.
    assert after(adaptive, 1, 1) == [1, 3]


def test_a_slot_of_no_steps_alone_stays_there():
    assert after(one_slot(0, start=3), 0, 0, 0) == [0, 0, 0]


def test_a_ceiling_lowers_what_does_not_rise():
    assert after(one_slot(1, 3, 5, 7, start=7), 4.3) == [7]
    assert after(one_slot(1, 3, 5, 7, start=7, ceiling_coeff=1.0), 4.3) == [5]
    assert after(one_slot(1, 3, 5, 7, start=3, ceiling_coeff=1.0), 3.0) == [5]
    assert after(one_slot(0, 1, 3, start=1, ceiling_coeff=0.1), 0.4) == [1]
    assert after(one_slot(0, 1, 3, start=1, ceiling_coeff=0.1, down_hysteresis=-1.0), 0.0) == [1]
    assert after(one_slot(3, 5, start=3, ceiling_coeff=0.1), 2.0) == [3]


def test_slots_learn_apart_and_a_replica_without_requests_changes_nothing():
    adaptive = AdaptiveSteps({1: Slot((1, 3)), 8: Slot((0, 1), warmup_batches=1)}, 3)
    adaptive.note_round(8, [0] * 8)
    adaptive.note_round(8, [])
    assert (adaptive.steps_for(1), adaptive.steps_for(8)) == (3, 1)
    adaptive.note_round(8, [0] * 8)
    assert (adaptive.steps_for(1), adaptive.steps_for(8)) == (3, 0)


def run(seed, adaptive):
    """The choices over random traffic."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(300):
        size = rng.choice([1, 2, 8, 20, 40, 100])
        chosen.append(adaptive.steps_for(size))
        adaptive.note_round(size, [rng.randint(0, chosen[-1]) for _ in range(size)])
    return chosen


def default_slots():
    return AdaptiveSteps({bound: Slot(slot.candidate_steps) for bound, slot in DEFAULT_SLOTS.items()}, 3)


def test_ranks_with_the_same_counts_choose_alike_and_one_with_its_own_does_not():
    """Why only broadcast counts may enter: one draft more on one rank is another number of forwards."""
    assert run(1, default_slots()) == run(1, default_slots())
    ours, theirs = (one_slot(1, 3, 5, start=3) for _ in range(2))
    ours.note_round(2, [3, 3])
    theirs.note_round(2, [3, 2])
    assert ours.steps_for(2) != theirs.steps_for(2)


def test_no_choice_passes_the_bound_that_buffers_are_sized_by():
    """The bound is the largest candidate of any slot and the root; the choices do reach it."""
    adaptive = default_slots()
    assert adaptive.candidate_steps == all_candidate_steps(True, None)
    chosen = run(2, adaptive)
    assert set(chosen) == set(adaptive.candidate_steps)
    assert max(chosen) + 1 == max(all_candidate_steps(True, None)) + 1 == 8

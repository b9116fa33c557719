from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.sampling.sampling_params import SamplingParams


def produced(token_ids):
    state = SamplingState(SamplingParams(min_new_tokens=4), 7, [5])
    for token_id in token_ids:
        state.append(token_id)
    return state


def test_the_state_after_tokens_is_the_one_that_appending_them_gives():
    first = produced([1, 1, 3])
    later = first.after([3, 8])
    grown = produced([1, 1, 3, 3, 8])
    for name in SamplingState.__slots__:
        assert getattr(later, name) == getattr(grown, name)
    assert first.counts == {1: 2, 3: 1} and first.num_output == 3
    assert first.suppresses_end and not later.suppresses_end

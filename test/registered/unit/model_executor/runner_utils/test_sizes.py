"""Which sizes are captured, which of them serves a batch, and that all ranks decide alike."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import pytest

from sglang.srt.model_executor.runner_utils.sizes import (
    LEAST_FREE_BYTES,
    check_sizes,
    default_sizes,
    least_of_group,
    may_capture,
    size_for,
)
from sglang.test.fakes.fake_group import FakeGroup


class GroupOf(FakeGroup):
    """A group in which the other ranks have these values."""

    def __init__(self, *others):
        super().__init__(1 + len(others))
        self.others = others

    def all_gather_object(self, value):
        return [value, *self.others]


@pytest.mark.parametrize(
    ("most", "width", "ranks", "sizes"),
    [
        (1, 1, 1, [1]),
        (3, 1, 1, [1, 2, 3]),
        (8, 1, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (22, 1, 1, [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 22]),
        (24, 1, 4, [4, 8, 12, 16, 20, 24]),
        (5, 1, 4, [4, 8]),
        (5, 2, 4, [2, 4, 6]),
        (3, 4, 4, [1, 2, 3]),
        (1, 3, 2, [2]),
    ],
)
def test_default_sizes_hold_the_largest_batch_and_can_be_shared(most, width, ranks, sizes):
    assert default_sizes(most, width=width, attn_tp_size=ranks) == sizes
    check_sizes(sizes, width=width, attn_tp_size=ranks)


def test_sizes_that_ranks_cannot_share_are_refused_with_some_that_they_can():
    with pytest.raises(ValueError, match=r"decode 6: with attention-TP 4 and width 1 .* use 4 8"):
        check_sizes([6], width=1, attn_tp_size=4)
    for wrong in ([], [0, 1], [-4]):
        with pytest.raises(ValueError, match="use 1 2 3 4 5 6 7 8"):
            check_sizes(wrong, width=1, attn_tp_size=1)


def test_the_smallest_size_that_fits_serves():
    assert [size_for([4, 1, 2], count) for count in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 4, None]


def test_the_poorest_rank_decides_for_all():
    assert least_of_group(5, None) == 5
    assert least_of_group(5, GroupOf(7, 3)) == 3
    assert may_capture(LEAST_FREE_BYTES, None)
    assert may_capture(LEAST_FREE_BYTES, GroupOf(LEAST_FREE_BYTES))
    assert not may_capture(2 * LEAST_FREE_BYTES, GroupOf(LEAST_FREE_BYTES - 1))

"""A plan that a graph may read stays where it is and says the same as the plan of an eager forward."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest
import torch

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.layers.attention.base_attn_backend import PlanShape
from sglang.test.attention_cases import AttentionCases, Sizes


def tensors_of(plan):
    padded = plan.padded[0]
    return {
        "slots": padded.slots,
        "mask": padded.mask,
        "lengths": plan.lengths,
        "out_cache_loc": plan.out_cache_loc,
    }


def addresses_of(plan):
    return {name: tensor.data_ptr() for name, tensor in tensors_of(plan).items()}


def random_batch(cases, count, width):
    """A plain step, a causal round or one of trees, with mixed lengths."""
    lengths = [cases.number(width, cases.sizes.context) for _ in range(count)]
    if width == 1:
        return cases.batch(lengths, spec=bool(cases.number(0, 1)))
    trees = cases.random_tree(count, width).ancestor_mask() if cases.number(0, 1) else None
    return cases.batch(lengths, width=width, mode=ForwardMode.TARGET_VERIFY, tail_mask=trees)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("width", [1, 4])
def test_a_plan_filled_twenty_times_never_moves_and_equals_the_eager_one(width, page_size):
    cases = AttentionCases(Sizes(page_size=page_size), seed=width)
    plan = cases.backend.make_plan(PlanShape(5, width, cases.sizes.context))
    before = addresses_of(plan)
    for _ in range(20):
        batch = random_batch(cases, 5, width)
        rows = cases.rows(batch)
        eager = cases.run(batch, rows)
        cases.backend.fill(plan, batch)
        assert addresses_of(plan) == before
        assert (cases.run_planned(plan, rows) - eager).abs().max() < 1e-5


def test_the_eager_plan_may_move_and_holds_one_batch_only():
    """The twin of the test above: what it compares does differ for a plan that is made anew."""
    cases = AttentionCases(Sizes(), seed=1)
    plan = cases.backend.init_forward_metadata(cases.batch([9, 12]))
    first = plan.padded[0]
    assert cases.backend.init_forward_metadata(cases.batch([9, 12])) is plan
    assert plan.padded[0] is not first


def test_the_parts_of_a_plan_lie_in_it_and_serve_smaller_batches():
    cases = AttentionCases(Sizes(), seed=2)
    whole = cases.backend.make_plan(PlanShape(6, 3, cases.sizes.context))
    for count in (4, 2, 1):
        part = cases.backend.part_of_plan(whole, count)
        assert addresses_of(part) == addresses_of(whole)
        batch = random_batch(cases, count, 3)
        rows = cases.rows(batch)
        eager = cases.run(batch, rows)
        cases.backend.fill(part, batch)
        assert (cases.run_planned(part, rows) - eager).abs().max() < 1e-5


def test_a_tail_mask_can_replace_the_one_of_the_batch():
    cases = AttentionCases(Sizes(), seed=3)
    plan = cases.backend.make_plan(PlanShape(2, 3, cases.sizes.context))
    before = addresses_of(plan)
    batch = cases.batch([20, 12], width=3)
    rows = cases.rows(batch)
    cases.backend.fill(plan, batch)
    batch.spec.tail_mask = cases.random_tree(2, 3).ancestor_mask()
    cases.backend.set_tail_mask(plan, batch.spec.tail_mask)
    assert (cases.run_planned(plan, rows) - cases.run(batch, rows)).abs().max() < 1e-5
    assert addresses_of(plan) == before


def test_requests_that_fill_a_batch_up_see_page_zero_and_are_finite():
    cases = AttentionCases(Sizes(), seed=4)
    width = 3
    plan = cases.backend.make_plan(PlanShape(3, width, cases.sizes.context))
    batch = cases.batch([12, cases.backend.padded_seq_len(width), 30], width=width)
    batch.out_cache_loc[width : 2 * width] = 0
    cases.table[batch.req_pool_indices[1]] = 0
    rows = cases.rows(batch)
    cases.backend.fill(plan, batch)
    assert torch.isfinite(cases.run_planned(plan, rows)).all()


@pytest.mark.parametrize(
    ("lengths", "width", "said"),
    [([9, 9, 9], 2, r"\[2, 2, 2\] rows"), ([9, 9], 3, r"\[3, 3\] rows"), ([9, 40], 2, r"\[9, 40\] keys")],
)
def test_a_batch_that_a_plan_has_no_room_for_is_refused_with_both_sizes(lengths, width, said):
    cases = AttentionCases(Sizes(), seed=5)
    plan = cases.backend.make_plan(PlanShape(2, 2, 30))
    with pytest.raises(RuntimeError, match=rf"2 requests of 2 rows and at most 30 keys .*{said}"):
        cases.backend.fill(plan, cases.batch(lengths, width=width))

"""Requests with several rows in a speculative round see exactly the keys that the round says."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import dataclasses

import pytest
import torch

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.layers.attention import torch_native_plan
from sglang.test.attention_cases import AttentionCases, Sizes
from sglang.test.spoiled_slots import spoil

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DECODE)


def difference(cases, batch):
    rows = cases.rows(batch)
    found = cases.run(batch, rows)
    assert torch.isfinite(found).all()
    return (found.double() - cases.by_hand(batch, rows)).abs().max().item()


def random_round(cases, width, mode, kind):
    """Mixed lengths; a causal round, one of trees, or the level of a draft, whose tail is longer."""
    count = cases.number(1, cases.sizes.num_requests)
    tail = width * cases.number(1, 3) if kind == "level" else width
    lengths = [cases.number(max(width, tail), cases.sizes.context) for _ in range(count)]
    tail_mask = None
    if kind == "tree":
        tail_mask = cases.random_tree(count, width).ancestor_mask()
    if kind == "level":
        tail_mask = torch.rand(count, width, tail, generator=cases.draw) < 0.5
        tail_mask[:, :, tail - width :] |= torch.eye(width, dtype=torch.bool)
    return cases.batch(lengths, width=width, mode=mode, tail_mask=tail_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
def test_a_round_gives_the_attention_of_the_formula(dtype, page_size, heads):
    cases = AttentionCases(Sizes(*heads, page_size=page_size, dtype=dtype), seed=page_size)
    for width in (1, 2, 4, 7):
        for kind in ("causal", "tree", "level"):
            batch = random_round(cases, width, MODES[width % 3], kind)
            assert difference(cases, batch) < TOLERANCE[dtype], (width, kind, batch.seq_lens_list)


def test_a_request_that_is_all_new_and_one_with_a_long_prefix_share_a_round():
    cases = AttentionCases(Sizes(), seed=3)
    assert difference(cases, cases.batch([4, 40, 5], width=4)) < 1e-5
    assert difference(cases, cases.batch([4, 4], width=4)) < 1e-5
    tree = cases.random_tree(3, 4).ancestor_mask()
    assert difference(cases, cases.batch([4, 40, 5], width=4, tail_mask=tree)) < 1e-5


@pytest.mark.parametrize("masked", [False, True])
def test_requests_far_apart_in_length_are_padded_apart(monkeypatch, masked):
    monkeypatch.setattr(torch_native_plan, "_MIN_LENGTH_TO_SPLIT", 8)
    cases = AttentionCases(Sizes(), seed=4)
    lengths = [5, 40, 12, 3, 38]
    mask = cases.random_tree(5, 3).ancestor_mask() if masked else None
    batch = cases.batch(lengths, width=3, tail_mask=mask)
    plan = cases.backend.init_forward_metadata(batch)
    assert [padded.length for padded in plan.padded] == [40, 12, 5]
    assert difference(cases, batch) < 1e-5


def test_a_chain_in_one_round_equals_its_tokens_one_by_one():
    """What makes greedy text equal with and without a draft."""
    cases = AttentionCases(Sizes(), seed=5)
    lengths = [9, 31, 17]
    batch = cases.batch(lengths, width=4, mode=ForwardMode.TARGET_VERIFY)
    q, k, v = cases.rows(batch)
    together = cases.run(batch, (q, k, v)).view(3, 4, -1)
    for r in range(4):
        slots = batch.out_cache_loc.view(3, 4)[:, r:].clone()
        spoil(cases.pool, 0, slots.flatten())
        ends = [length - 3 + r for length in lengths]
        step = dataclasses.replace(
            batch,
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=slots[:, 0],
            seq_lens=torch.tensor(ends),
            seq_lens_list=ends,
            extend_lens=[1, 1, 1],
            spec=None,
        )
        alone = cases.run(step, (q[r::4], k[r::4], v[r::4]))
        assert (together[:, r] - alone).abs().max() < 1e-5


def test_a_tree_whose_links_are_a_chain_is_the_chain():
    cases = AttentionCases(Sizes(), seed=6)
    batch = cases.batch([12, 20], width=5)
    rows = cases.rows(batch)
    causal = cases.run(batch, rows)
    batch.spec.tail_mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5)
    assert torch.equal(cases.run(batch, rows), causal)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_one_key_off_is_noticed(monkeypatch, shift):
    """The twin: the comparison above sees a key too many and one too few."""
    true_mask = torch_native_plan.unseen_keys
    monkeypatch.setattr(
        torch_native_plan, "unseen_keys", lambda lengths, *rest: true_mask(lengths + shift, *rest)
    )
    cases = AttentionCases(Sizes(), seed=7)
    for mask in (None, cases.random_tree(2, 3).ancestor_mask()):
        batch = cases.batch([12, 20], width=3, tail_mask=mask)
        rows = cases.rows(batch)
        found = cases.run(batch, rows).double()
        assert not ((found - cases.by_hand(batch, rows)).abs().max() < 1e-2)


def test_a_round_whose_lists_disagree_is_refused_with_both():
    cases = AttentionCases(Sizes(), seed=8)
    batch = cases.batch([12, 20], width=3)
    batch.extend_lens = [3, 2]
    with pytest.raises(RuntimeError, match=r"width 3 .* \[3, 2\] rows and \[12, 20\] keys"):
        cases.backend.init_forward_metadata(batch)
    batch = cases.batch([12, 6], width=3, tail_mask=torch.ones(2, 3, 8, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"newest 8 keys .* \[12, 6\] keys"):
        cases.backend.init_forward_metadata(batch)


def test_no_length_is_asked_of_the_device():
    """Lengths come from the host lists: the planned numbers follow them, whatever the tensor says."""
    cases = AttentionCases(Sizes(), seed=9)
    batch = cases.batch([12, 20], width=3)
    batch.seq_lens.fill_(-1)
    assert difference(cases, batch) < 1e-5
    assert cases.backend.eager_plan.padded[0].length == 20


def test_a_prompt_that_brings_hidden_rows_is_still_a_prompt():
    """A draft's own prompts have a spec input, and each request its own number of rows."""
    cases = AttentionCases(Sizes(), seed=10)
    batch = cases.batch([12, 20], width=3, mode=ForwardMode.EXTEND)
    batch.spec.width = 1
    assert difference(cases, batch) < 1e-5
    assert len(cases.backend.eager_plan.many) == 2 and not cases.backend.eager_plan.padded

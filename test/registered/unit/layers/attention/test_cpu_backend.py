"""The back end of the compiled kernel gives the attention of the formula, whatever a batch brings."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import dataclasses

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.layers.attention import kv_block_layout
from sglang.srt.layers.attention.base_attn_backend import PlanShape
from sglang.srt.layers.attention.cpu_backend import CpuBackend
from sglang.test.attention_cases import AttentionCases, Sizes
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

needs_kernels = pytest.mark.skipif(
    compiled_kernels() is None, reason="sgl_kernel is not installed, or switched off"
)
#: Of each type of computation and of the cache.
TOLERANCE = {
    (torch.float32, torch.float32): 1e-5,
    (torch.bfloat16, torch.bfloat16): 2e-2,
    (torch.float32, torch.int8): 1e-3,
    (torch.bfloat16, torch.int8): 2e-2,
}
CPU = {"attention_backend": "cpu"}
CACHES = {"auto": CPU, "int8": {**CPU, "kv_cache_dtype": "int8"}}


def cases_of(*heads, **sizes):
    return AttentionCases(Sizes(*heads, **sizes), seed=1, backend=CpuBackend)


def random_round(cases, width):
    """Mixed lengths and a causal round, one of trees, or a level of a draft whose tail is longer."""
    kind = cases.number(0, 2)
    count = cases.number(1, cases.sizes.num_requests)
    tail = 2 * width if kind == 2 else width
    lengths = [cases.number(tail, cases.sizes.context) for _ in range(count)]
    mask = None
    if kind == 1:
        mask = cases.random_tree(count, width).ancestor_mask()
    if kind == 2:
        mask = torch.rand(count, width, tail, generator=cases.draw) < 0.5
        mask[:, :, tail - width :] |= torch.eye(width, dtype=torch.bool)
    return cases.batch(lengths, width=width, mode=ForwardMode.TARGET_VERIFY, tail_mask=mask)


@needs_kernels
@pytest.mark.parametrize("types", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
def test_rounds_and_steps_give_the_attention_of_the_formula(types, page_size, heads):
    dtype, cache_dtype = types
    cases = cases_of(*heads, page_size=page_size, dtype=dtype, cache_dtype=cache_dtype)
    for width in (1, 2, 4, 7, 1, 3):
        batch = random_round(cases, width)
        rows = cases.rows(batch)
        found = cases.run(batch, rows)
        assert (found.double() - cases.by_hand(batch, rows)).abs().max() < TOLERANCE[types]


@needs_kernels
def test_a_plan_for_graphs_never_moves_and_says_what_the_eager_one_says():
    cases = cases_of()
    plan = cases.backend.make_plan(PlanShape(5, 3, cases.sizes.context))
    addresses = None
    for number in range(12):
        mask = cases.random_tree(5, 3).ancestor_mask() if number % 3 != 1 else None
        lengths = [cases.number(3, cases.sizes.context) for _ in range(5)]
        batch = cases.batch(lengths, width=3, mode=ForwardMode.TARGET_VERIFY, tail_mask=mask)
        rows = cases.rows(batch)
        cases.backend.fill(plan, batch)
        tensors = plan.out_cache_loc, plan.table_rows, plan.first_rows, plan.lengths, plan.tail_mask
        addresses = addresses or [tensor.data_ptr() for tensor in tensors]
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert torch.equal(cases.run_planned(plan, rows), cases.run(batch, rows))
    with pytest.raises(RuntimeError, match="5 requests of 3 rows and at most 40 keys cannot hold a batch of"):
        cases.backend.fill(plan, cases.batch([9, 9], width=3, mode=ForwardMode.TARGET_VERIFY))


@needs_kernels
def test_the_parts_of_a_plan_lie_in_it_and_serve_smaller_batches():
    cases = cases_of()
    plan = cases.backend.make_plan(PlanShape(5, 2, cases.sizes.context))
    part = cases.backend.part_of_plan(plan, 3)
    batch = cases.batch([9, 30, 4], width=2, mode=ForwardMode.TARGET_VERIFY)
    rows = cases.rows(batch)
    cases.backend.fill(part, batch)
    assert part.lengths.data_ptr() == plan.lengths.data_ptr()
    assert torch.equal(cases.run_planned(part, rows), cases.run(batch, rows))
    tree = cases.random_tree(3, 2).ancestor_mask()
    cases.backend.set_tail_mask(part, tree)
    batch.spec = dataclasses.replace(batch.spec, tail_mask=tree)
    assert torch.equal(cases.run_planned(part, rows), cases.run(batch, rows))


@needs_kernels
def test_a_mask_of_the_last_batch_is_noticed(monkeypatch):
    cases = cases_of()
    plan = cases.backend.make_plan(PlanShape(2, 3, cases.sizes.context))
    monkeypatch.setattr(
        type(plan),
        "set_tail_mask",
        lambda self, mask: setattr(
            self, "tail_mask", self.tail_mask if self.tail_mask is not None else mask.clone()
        ),
    )
    wrong = []
    for _ in range(4):
        mask = cases.random_tree(2, 3).ancestor_mask()
        batch = cases.batch([9, 12], width=3, mode=ForwardMode.TARGET_VERIFY, tail_mask=mask)
        rows = cases.rows(batch)
        cases.backend.fill(plan, batch)
        wrong.append(not torch.equal(cases.run_planned(plan, rows), cases.run(batch, rows)))
    assert any(wrong)


def test_without_the_kernels_the_back_end_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(kv_block_layout, "compiled_kernels", lambda: None)
    with pytest.raises(RuntimeError, match=r"run `make kernels`, or use torch_native"):
        cases_of()


@needs_kernels
def test_a_cache_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"bfloat16 and int8, and this one is of torch.float16; use"):
        cases_of(dtype=torch.float16)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=256)


PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 140)), [200]]


@needs_kernels
@pytest.mark.parametrize("cache", CACHES)
def test_logits_do_not_depend_on_neighbours_chunks_or_steps_to_the_last_bit(target, cache):
    with driven_worker(target, **CACHES[cache]) as driver:
        seqs = [driver.add(prompt) for prompt in PROMPTS]
        together = driver.logits([(seq, len(seq.ids)) for seq in seqs])
        for i, prompt in enumerate(PROMPTS):
            assert torch.equal(driver.logits([(driver.add(prompt), len(prompt))])[0], together[i])
        for size in (1, 33, 64):
            seq, logits = driver.add(PROMPTS[1]), None
            while seq.cached < len(seq.ids):
                logits = driver.logits([(seq, min(size, len(seq.ids) - seq.cached))])
            assert torch.equal(logits[0], together[1]), size


@needs_kernels
@pytest.mark.parametrize("kind", [None, "eagle", "eagle3"])
def test_tokens_are_those_of_plain_torch(target, tmp_path, kind):
    fields = {}
    if kind is not None:
        fields = {
            "speculative_algorithm": kind.upper(),
            "speculative_draft_model_path": str(write_random_draft(tmp_path, target, kind)),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 6,
        }
    with driven_worker(target) as driver:
        expected = driver.generate([driver.add(prompt) for prompt in PROMPTS], 20)
    with driven_worker(target, **CPU, **fields) as driver:
        seqs = [driver.add(prompt) for prompt in PROMPTS]
        found = driver.generate(seqs, 20) if kind is None else driver.speculate(seqs, 20)[0]
    assert found == expected


@needs_kernels
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_changes_no_token_over_a_cache_of_int8_also_where_its_own_is_one(target, tmp_path, kind):
    """Nodes that are accepted move to other slots bit for bit."""
    fields = {
        "speculative_algorithm": kind.upper(),
        "speculative_draft_model_path": str(write_random_draft(tmp_path, target, kind)),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    }
    with driven_worker(target, **CACHES["int8"]) as driver:
        expected = driver.generate([driver.add(prompt) for prompt in PROMPTS], 20)
    for draft_cache in (None, "int8"):
        fields["speculative_draft_kv_cache_dtype"] = draft_cache
        with driven_worker(target, **CACHES["int8"], **fields) as driver:
            assert driver.speculate([driver.add(prompt) for prompt in PROMPTS], 20)[0] == expected


@needs_kernels
def test_int8_takes_what_the_layout_says_and_a_slot_that_moves_keeps_its_bits(target):
    with driven_worker(target, **CACHES["int8"]) as driver:
        pool = driver.target.pools.kv
        per_token = CpuBackend.kv_layout.bytes_per_token(pool.spec)
        slots = -(-(pool.size + pool.page_size) // 16) * 16
        assert sum(pool.layer(i).nbytes for i in range(pool.spec.num_layers)) == per_token * slots
        numbers, scales = pool.spec.head_dim, 4
        assert per_token == 2 * pool.spec.num_layers * pool.spec.num_kv_heads * (numbers + scales)
        driver.generate([driver.add(PROMPTS[1])], 1)
        sources, targets = torch.tensor([18, 19]), torch.tensor([200, 18])
        before = pool.read(0, sources)
        pool.move(sources, targets)
        assert before.any() and torch.equal(pool.read(0, targets), before)

"""All steps of a draft, or its pass over accepted tokens, as one graph equal the same unit run eagerly."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import dataclasses

import pytest
import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import SpecInput
from sglang.srt.model_executor.runner.static_batch import ForwardShape, GraphSizes, StaticBatch
from sglang.srt.model_executor.runner_utils.buffers import BufferSpec
from sglang.srt.speculative.draft_graph_runner import DraftGraphRunner, DraftWork
from sglang.test.fakes.graph_cases import SIZES, GraphCases
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

K, STEPS = 2, 3  # branches of a draft and the levels after the first
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def cases(folder):
    with driven_worker(folder) as driver:
        yield GraphCases(driver)


def chain_unit(inputs, batches, run):
    """Greedy tokens, each step on from the one before."""
    ids, logits = inputs["ids"], []
    for step, batch in enumerate(batches):
        output = run(step, dataclasses.replace(batch, input_ids=ids))
        logits.append(output.logits)
        ids = output.logits.argmax(dim=-1)
    return {"ids": ids, "logits": torch.stack(logits, dim=1)}


def tree_unit(inputs, batches, run):
    """Levels of K branches; the better branch of a level is the parent of all of the next."""
    ids = inputs["ids"]  # [requests, K]: the first level
    requests = ids.shape[0]
    seen = torch.eye(K, dtype=torch.bool).expand(requests, K, K)
    scores = []
    for step, batch in enumerate(batches):
        spec = SpecInput(K, tail_mask=seen)
        output = run(step, dataclasses.replace(batch, input_ids=ids.reshape(-1), spec=spec))
        logits = output.logits.view(requests, K, -1)
        scores.append(logits)
        best = logits.amax(dim=-1).argmax(dim=-1)  # [requests]: which branch goes on
        ids = logits.gather(1, best[:, None, None].expand(-1, 1, logits.shape[2])).topk(K, dim=-1)[1][:, 0]
        path = seen.gather(1, best[:, None, None].expand(-1, 1, seen.shape[2])).expand(-1, K, -1)
        seen = torch.cat((path, torch.eye(K, dtype=torch.bool).expand(requests, K, K)), dim=2)
    return {"ids": ids, "scores": torch.stack(scores, dim=1)}


def extend_unit(inputs, batches, run):
    """One pass over N rows of each request, scored at one row that the inputs name."""
    (batch,) = batches
    rows = torch.arange(batch.seq_lens.shape[0]) * batch.spec.width + inputs["last"]
    spec = dataclasses.replace(batch.spec, logit_rows=rows)
    output = run(0, dataclasses.replace(batch, spec=spec, capture_hidden=True))
    hidden = output.hidden.view(rows.shape[0], batch.spec.width, -1)
    return {"logits": output.logits, "hidden": hidden}


def draft_batches(cases, sequences, widths, mode=ForwardMode.DECODE):
    """A batch for each forward; the rows of one follow those of the one before in the cache."""
    batches = []
    for width in widths:
        for sequence in sequences:
            sequence.ids += [cases.number(3, 511) for _ in range(width)]
        batch = cases.driver.batch([(sequence, width) for sequence in sequences])
        batches.append(dataclasses.replace(batch, forward_mode=mode, spec=SpecInput(width)))
    for sequence in sequences:
        del sequence.ids[-sum(widths) :]
        sequence.cached -= sum(widths)
    return batches


UNITS = {
    "chain": (chain_unit, [ForwardShape(ForwardMode.DECODE, 1)] * STEPS, [BufferSpec("ids")]),
    "tree": (
        tree_unit,
        [ForwardShape(ForwardMode.DECODE, K, tail=K * (i + 1), mask_in_unit=True) for i in range(STEPS)],
        [BufferSpec("ids", shape=(K,))],
    ),
    "extend": (extend_unit, [ForwardShape(ForwardMode.DRAFT_EXTEND, 4)], [BufferSpec("last")]),
}


def graph_runner(cases, name, **options):
    unit, shapes, inputs = UNITS[name]
    runner = DraftGraphRunner(
        f"draft {name}",
        unit,
        cases.runner.model,
        cases.runner.attn_backend,
        shapes=shapes,
        inputs=inputs,
        sizes=GraphSizes(SIZES, 512, cases.driver.target.pools.req_to_token.spare_row),
        make_backend=cases.make_backend,
        device=cases.runner.device,
        **options,
    )
    runner.graphs.capture()
    return runner


def random_work(cases, name, sequences):
    _, shapes, (spec,) = UNITS[name]
    count = len(sequences)
    high = 3 if name == "extend" else 511
    numbers = torch.randint(0, high + 1, (count, *spec.shape), generator=cases.draw)
    widths = [shape.width for shape in shapes]
    batches = draft_batches(cases, sequences, widths, shapes[0].mode)
    return DraftWork(count, count, widths, {spec.name: numbers}, batches)


@torch.inference_mode()
def difference(cases, name, runner, work):
    eager = UNITS[name][0](work.inputs, work.batches, lambda _, batch: cases.runner.forward(batch))
    found = runner.run(work)
    assert found.keys() == eager.keys()
    for key, value in eager.items():
        assert found[key].shape == value.shape
    if "ids" in eager and not torch.equal(found["ids"], eager["ids"]):
        return float("inf")
    worst = max((found[key] - value).abs().max() for key, value in eager.items())
    return float("inf") if worst.isnan() else float(worst)


def random_differences(cases, name, runner, rounds=8):
    sequences = cases.sequences(5)
    for _ in range(rounds):
        order = torch.randperm(5, generator=cases.draw)[: cases.number(1, 4)]
        work = random_work(cases, name, [sequences[i] for i in order])
        assert runner.can_run(work)
        yield difference(cases, name, runner, work)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_over_one_graph_equals_the_unit_run_eagerly(cases, name):
    runner = graph_runner(cases, name)
    assert max(random_differences(cases, name, runner)) < CLOSE
    assert len(cases.backends[0].replays) == 8  # one a round, whatever the number of steps


def test_what_a_draft_gives_outlives_the_next_replay(cases):
    runner = graph_runner(cases, "chain")
    sequences = cases.sequences(4)
    with torch.inference_mode():
        kept = runner.run(random_work(cases, "chain", sequences))
        copies = {name: value.clone() for name, value in kept.items()}
        runner.run(random_work(cases, "chain", sequences[:2]))
    assert all(torch.equal(kept[name], copies[name]) for name in kept)


def test_an_idle_replica_replays_the_size_of_the_largest(cases):
    runner = graph_runner(cases, "tree")
    none = torch.empty(0, dtype=torch.int64)
    idle = ForwardBatch(ForwardMode.IDLE, none, none, none, none, none, [], [], [])
    work = DraftWork(0, 3, [K] * STEPS, {"ids": torch.empty(0, K, dtype=torch.int64)}, [idle] * STEPS)
    with torch.inference_mode():
        assert runner.run(work)["ids"].shape == (0, K)
    assert cases.backends[0].replays[-1].size == 4
    assert not runner.can_run(dataclasses.replace(work, most_requests=5))
    with pytest.raises(RuntimeError, match="no graph is captured for 5 requests"):
        runner.run(dataclasses.replace(work, most_requests=5))
    assert not runner.can_run(dataclasses.replace(work, widths=[1] * STEPS)), "rounds of other widths"


def test_page_zero_stays_finite_whatever_pads_a_tree(cases):
    """A padding row that sees no key would be NaN, write NaN into slot 0, and spread from there."""
    runner = graph_runner(cases, "tree")
    assert max(random_differences(cases, "tree", runner, rounds=3)) < CLOSE
    assert torch.isfinite(cases.driver.target.pools.kv.read(1, torch.tensor([0]))).all()


# Planted mistakes.


def test_a_mask_of_the_last_round_is_noticed(cases, monkeypatch):
    runner = graph_runner(cases, "tree")
    monkeypatch.setattr(StaticBatch, "_fill_plan", lambda self, lengths, size: None)
    assert not max(random_differences(cases, "tree", runner)) < CLOSE


def test_a_step_that_goes_on_from_the_staged_ids_is_noticed(cases, monkeypatch):
    """The unit reads a tensor that stands outside of it at capture, where it should read its input."""
    baked = torch.full((4,), 5)

    def forgetful(inputs, batches, run):
        return chain_unit({"ids": baked[: inputs["ids"].shape[0]]}, batches, run)

    monkeypatch.setitem(UNITS, "chain", (forgetful, *UNITS["chain"][1:]))
    runner = graph_runner(cases, "chain")
    monkeypatch.setitem(UNITS, "chain", (chain_unit, *UNITS["chain"][1:]))
    assert not max(random_differences(cases, "chain", runner)) < CLOSE


def test_a_draft_that_asks_the_device_is_refused_by_name_with_its_size(cases, monkeypatch):
    def asks(inputs, batches, run):
        if int(inputs["ids"].max()) < 0:
            raise AssertionError
        return chain_unit(inputs, batches, run)

    monkeypatch.setitem(UNITS, "chain", (asks, *UNITS["chain"][1:]))
    with pytest.raises(RuntimeError, match=r"draft chain: capturing a graph of 4 requests failed: .*__int__"):
        graph_runner(cases, "chain")

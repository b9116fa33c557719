"""A step over a recorded graph equals the eager step, whatever its size; each known mistake is noticed."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import dataclasses

import numpy as np
import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.base import ShapeKey
from sglang.srt.model_executor.runner_utils.buffers import StaticBuffers
from sglang.test.fakes.graph_cases import GraphCases
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

DECODE = ForwardShape(ForwardMode.DECODE, 1)
VERIFY = ForwardShape(ForwardMode.TARGET_VERIFY, 4)
TREES = ForwardShape(ForwardMode.TARGET_VERIFY, 4, tail=4)
CLOSE = 1e-4  # logits of the tiny model are of the order of one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def cases(folder):
    with driven_worker(folder) as driver:
        yield GraphCases(driver)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [DECODE, VERIFY, TREES], ids=["decode", "chains", "trees"])
def test_a_step_over_a_graph_equals_the_eager_step(folder, shape, page_size):
    with driven_worker(folder, page_size=page_size) as driver:
        cases = GraphCases(driver, seed=page_size)
        runner = cases.graph_runner(shape)
        assert max(cases.random_differences(shape, runner)) < CLOSE
        assert {key.size for key in cases.backends[0].replays} == {1, 2, 4}


def test_greedy_text_over_graphs_is_the_eager_text(cases):
    prompts = [seq.ids for seq in cases.sequences(3)]
    eager = cases.driver.generate([cases.driver.add(ids) for ids in prompts], 12)
    cases.runner.graph_runners.append(cases.graph_runner(DECODE))
    assert cases.driver.generate([cases.driver.add(ids) for ids in prompts], 12) == eager
    assert cases.backends[0].replays == [ShapeKey(4)] * 11


def test_hidden_rows_come_with_the_round_and_are_the_callers_own(cases):
    cases.runner.model.set_aux_layers([0, 1])
    runner = cases.graph_runner(VERIFY, captures_hidden=True)
    sequences = cases.sequences(3)
    batch = cases.verify(sequences, 4)
    batch.capture_hidden = True
    assert cases.difference(runner, batch) < CLOSE
    with torch.inference_mode():
        kept = runner.run(batch)
        hidden = kept.hidden.clone()
        runner.run(cases.verify(sequences[:2], 4))
    assert torch.equal(kept.hidden, hidden)


def test_chosen_rows_are_taken_out_of_the_round(cases):
    runner = cases.graph_runner(VERIFY)
    batch = cases.verify(cases.sequences(3), 4)
    batch.spec.logit_rows = torch.tensor([0, 5, 11])
    assert cases.difference(runner, batch) < CLOSE


def test_what_no_graph_serves_runs_eagerly(cases):
    runner = cases.graph_runner(DECODE)
    cases.runner.graph_runners.append(runner)
    sequences = cases.sequences(5)
    batch = cases.decode(sequences)
    assert not runner.can_run(batch) and cases.runner.runner_for(batch) is cases.runner.eager_runner
    with pytest.raises(RuntimeError, match="this batch of 5"):
        runner.run(batch)
    assert runner.can_run(cases.decode(sequences[:4]))
    others = [
        cases.verify(sequences[:2], 4),
        dataclasses.replace(cases.decode(sequences[:2]), capture_hidden=True),
        dataclasses.replace(cases.decode(sequences[:2]), forward_mode=ForwardMode.EXTEND),
    ]
    assert not any(runner.can_run(batch) for batch in others)
    verify = cases.graph_runner(TREES)
    assert verify.can_run(cases.verify(sequences[:2], 4, trees=True))
    assert not verify.can_run(cases.verify(sequences[:2], 3, trees=True))
    runner.graphs.drop()
    assert not runner.can_run(cases.decode(sequences[:2]))


def test_a_step_of_replicas_goes_by_the_largest_and_prompts_run_eagerly(cases):
    """A rank that went by its own requests would replay another graph than its peers and hang them."""
    runner = cases.graph_runner(VERIFY)
    batch = cases.verify(cases.sequences(1), 4)
    agreed = DpStep([4, 12], [4, 12], is_extend=False, num_requests=[1, 3])
    batch.dp_step = agreed
    idle = ForwardBatch.idle(agreed, torch.device("cpu"))
    assert runner._size(batch) == runner._size(idle) == 4
    assert runner.can_run(idle)
    with torch.inference_mode():
        assert runner.run(idle).logits.shape == (0, 512)
    for other in (
        dataclasses.replace(agreed, is_extend=True),
        dataclasses.replace(agreed, num_tokens=[1, 3]),
        dataclasses.replace(agreed, num_tokens=[4, 20], num_requests=[1, 5]),
    ):
        assert not runner.can_run(dataclasses.replace(batch, dp_step=other))
        assert not runner.can_run(ForwardBatch.idle(other, torch.device("cpu")))


def test_logprob_requests_of_a_decode_step_stay_with_it(cases):
    runner = cases.graph_runner(DECODE)
    batch = cases.decode(cases.sequences(2))
    batch.logprob_requests = [LogprobRequest(top_num=2), None]
    assert cases.difference(runner, batch) < CLOSE


# Each mistake below is planted; the comparison of the tests above has to notice it.


def worst(cases, shape, runner):
    return max(cases.random_differences(shape, runner, rounds=8))


@pytest.mark.parametrize("shape", [DECODE, VERIFY], ids=["decode", "chains"])
def test_a_length_in_python_is_noticed(cases, monkeypatch, shape):
    """The mask is made inside the graph, of the host list that the batch had at capture."""
    backend = cases.runner.attn_backend
    forward = type(backend).forward

    def with_host_lengths(self, q, k, v, layer, plan):
        if plan is not self.eager_plan:
            hidden = torch.arange(plan.shape.max_len) >= plan.shape.width
            plan.mask.masked_fill_(hidden, float("-inf"))
        return forward(self, q, k, v, layer, plan)

    monkeypatch.setattr(type(backend), "forward", with_host_lengths)
    assert not worst(cases, shape, cases.graph_runner(shape)) < CLOSE


@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_an_input_that_is_bound_anew_is_noticed(cases, monkeypatch, name):
    runner = cases.graph_runner(DECODE)
    write = StaticBuffers.write

    def rebinds(self, values, num_requests, size):
        self._tensors[name] = self._tensors[name].clone()
        self._hosts[name] = self._tensors[name].numpy()
        write(self, values, num_requests, size)

    monkeypatch.setattr(StaticBuffers, "write", rebinds)
    assert not worst(cases, DECODE, runner) < CLOSE


def test_an_output_read_after_another_replay_is_noticed(cases):
    runner = cases.graph_runner(DECODE)
    batch = cases.decode(cases.sequences(2))
    with torch.inference_mode():
        expected = cases.runner.eager_runner.run(batch).logits
        late = runner.run(batch).logits
        assert (late - expected).abs().max() < CLOSE
        runner.run(cases.decode(cases.sequences(1)))
    assert not (late - expected).abs().max() < CLOSE


def shrinking(cases, runner):
    """Four requests, then three of them after the fourth gave its slots to somebody else."""
    sequences = cases.sequences(4)
    assert cases.difference(runner, cases.decode(sequences)) < CLOSE
    gone = sequences.pop()
    heir = cases.driver.add(gone.ids)
    heir.slots = gone.slots
    cases.driver.target.pools.req_to_token.write(heir.req_pool_idx, 0, np.array(heir.slots))
    cases.driver.logits([(heir, len(heir.ids))])
    return cases.difference(runner, cases.decode(sequences))


def test_a_smaller_batch_leaves_nothing_of_the_larger_one(cases):
    assert shrinking(cases, cases.graph_runner(DECODE)) < CLOSE


def test_a_tail_that_is_not_reset_is_noticed(cases, monkeypatch):
    """Rows of the larger batch go on writing into slots that belong to somebody else by now."""
    runner = cases.graph_runner(DECODE)
    write = StaticBuffers.write

    def forgets_slots(self, values, num_requests, size):
        before = self.views(size).get("out_cache_loc")
        before = None if before is None else before.clone()
        write(self, values, num_requests, size)
        if before is not None:
            self.views(size)["out_cache_loc"][num_requests:].copy_(before[num_requests:])

    monkeypatch.setattr(StaticBuffers, "write", forgets_slots)
    assert not shrinking(cases, runner) < CLOSE

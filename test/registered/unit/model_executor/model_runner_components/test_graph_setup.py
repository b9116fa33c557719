"""A runner gets graphs for every batch it may meet, or none where a rank has no memory for them."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import logging

import pytest

from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.model_executor.model_runner_components.graph_setup import add_decode_graphs
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_utils.sizes import LEAST_FREE_BYTES
from sglang.test.fakes.graph_cases import GraphCases
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker


@pytest.fixture
def cases(tmp_path):
    with driven_worker(write_tiny_model(tmp_path, seed=3)) as driver:
        yield GraphCases(driver)


def test_decode_steps_and_rounds_of_a_width_replay_and_the_rest_runs_eagerly(cases):
    runner = cases.runner
    table = cases.driver.target.pools.req_to_token
    added = [
        add_decode_graphs(
            runner, table, shape, cases.make_backend, max_requests=3, free_bytes=LEAST_FREE_BYTES
        )
        for shape in (ForwardShape(ForwardMode.DECODE, 1), ForwardShape(ForwardMode.TARGET_VERIFY, 2))
    ]
    assert runner.graph_runners == added
    sequences = cases.sequences(4)
    assert runner.runner_for(cases.decode(sequences[:3])) is added[0]
    assert runner.runner_for(cases.verify(sequences[:3], 2)) is added[1]
    for batch in (cases.decode(sequences), cases.verify(sequences[:3], 3)):
        assert runner.runner_for(batch) is runner.eager_runner
    assert all(cases.difference(graphs, cases.decode(sequences[:2])) < 1e-4 for graphs in added[:1])


def test_without_memory_everything_runs_eagerly_and_a_line_says_so(cases, caplog):
    shape = ForwardShape(ForwardMode.DECODE, 1)
    table, free = cases.driver.target.pools.req_to_token, LEAST_FREE_BYTES - 1
    assert (
        add_decode_graphs(cases.runner, table, shape, cases.make_backend, max_requests=3, free_bytes=free)
        is None
    )
    assert not cases.runner.graph_runners and not cases.backends
    assert "No graphs are captured for decode: a rank has less than 1024 MiB free" in caplog.text


@pytest.mark.parametrize(("shared", "said"), [(None, "unknown"), (3 << 20, "3.0 MiB")])
def test_a_line_says_how_many_graphs_there_are_and_what_memory_they_share(
    cases, caplog, monkeypatch, shared, said
):
    def make_backend():
        backend = cases.make_backend()
        monkeypatch.setattr(type(backend), "shared_bytes", shared)
        return backend

    shape, table = ForwardShape(ForwardMode.DECODE, 1), cases.driver.target.pools.req_to_token
    with caplog.at_level(logging.INFO):
        add_decode_graphs(
            cases.runner, table, shape, make_backend, max_requests=3, free_bytes=LEAST_FREE_BYTES
        )
    assert f"mode=decode, #graphs=3, sizes=[1, 2, 3], memory of all graphs so far={said}" in caplog.text

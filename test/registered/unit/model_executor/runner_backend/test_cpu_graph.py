"""Steps from lists of kernel calls equal the eager ones to the last bit, and nothing is baked in silently."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="unit-cpu")

import logging
import subprocess
import sys

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.batch.forward_batch import ForwardMode
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.base import ShapeKey
from sglang.srt.model_executor.runner_backend.cpu_graph import CpuGraphBackend
from sglang.srt.model_executor.runner_utils.recorded_step import HostReadError
from sglang.test.fakes import graph_cases
from sglang.test.fakes.graph_cases import SIZES, GraphCases
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

pytestmark = pytest.mark.skipif(compiled_kernels() is None, reason="the compiled kernels are not used")

SHAPES = {
    "decode": ForwardShape(ForwardMode.DECODE, 1),
    "chains": ForwardShape(ForwardMode.TARGET_VERIFY, 4),
    "trees": ForwardShape(ForwardMode.TARGET_VERIFY, 4, tail=4),
}


class Recorder:
    """Makes back ends, and keeps them to look into."""

    def __init__(self):
        self.backends = []

    def __call__(self):
        self.backends.append(CpuGraphBackend())
        return self.backends[-1]

    @property
    def graphs(self):
        return self.backends[-1].graphs


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def folder(tmp_path_factory, request):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3, architecture=request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_from_the_list_gives_the_bits_of_the_eager_one(folder, shape, dtype):
    with driven_worker(folder, attention_backend="cpu", dtype=dtype) as driver:
        cases, recorder = GraphCases(driver), Recorder()
        runner = cases.graph_runner(SHAPES[shape], captures_hidden=True, make_backend=recorder)
        assert list(cases.random_differences(SHAPES[shape], runner)) == [0.0] * 8
        for size in SIZES:
            graph = recorder.graphs[ShapeKey(size)]
            assert not graph.from_python
            assert len(graph.parts) == 1, "all of a step is one list"


RECORDED_ALONE = """
import sys
import torch
from sglang.srt.model_executor.runner_backend import cpu_graph
from sglang.srt.model_executor.runner_backend.base import ShapeKey
from sglang.test.test_utils import published_topology

if sys.argv[1] == "as torch has it":
    del cpu_graph._Recorder._should_skip_dynamo
    class Recorder(cpu_graph._Recorder):
        def __torch_dispatch__(self, *rest, **named):
            return super().__torch_dispatch__(*rest, **named)
    cpu_graph._Recorder = Recorder
with published_topology():
    backend = cpu_graph.CpuGraphBackend()
    backend.capture(ShapeKey(1), lambda: {"sum": torch.ones(2) + 1})
    assert backend.replay(ShapeKey(1))["sum"].tolist() == [2.0, 2.0]
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("recorder", ["ours", "as torch has it"])
def test_recording_does_not_import_a_compiler_that_takes_most_of_a_second(recorder):
    words = [sys.executable, "-c", RECORDED_ALONE, recorder]
    assert subprocess.run(words, check=False).returncode == (recorder != "ours")


def test_graphs_of_all_sizes_take_hardly_more_memory_than_the_largest(folder, monkeypatch):
    """Their results too: one holds until the next replay only."""
    taken = []
    for sizes in (SIZES[-1:], SIZES):
        monkeypatch.setattr(graph_cases, "SIZES", sizes)
        with driven_worker(folder, attention_backend="cpu") as driver:
            recorder = Recorder()
            GraphCases(driver).graph_runner(SHAPES["chains"], make_backend=recorder)
            assert len(recorder.graphs) == len(sizes)
            taken.append(recorder.backends[-1].arena.bytes)
    assert taken[0] > 0 and taken[1] < 1.2 * taken[0]


def test_a_cached_page_of_sixteen_slots_makes_no_difference(folder):
    with driven_worker(folder, attention_backend="cpu", page_size=16) as driver:
        cases = GraphCases(driver, seed=5)
        runner = cases.graph_runner(SHAPES["trees"], make_backend=Recorder())
        assert list(cases.random_differences(SHAPES["trees"], runner)) == [0.0] * 8


def test_what_is_no_kernel_runs_from_python_between_lists_and_a_line_names_it(folder, caplog):
    caplog.set_level(logging.INFO, logger="sglang.srt.model_executor.runner_backend.cpu_graph")
    with driven_worker(folder, attention_backend="torch_native") as driver:
        cases, recorder = GraphCases(driver), Recorder()
        runner = cases.graph_runner(SHAPES["decode"], make_backend=recorder)
        assert max(cases.random_differences(SHAPES["decode"], runner)) < 1e-4
        graph = recorder.graphs[ShapeKey(1)]
        assert graph.from_python and len(graph.parts) > 2
    assert "A graph of 1 requests runs from Python, slower: " in caplog.text
    assert "index_" in caplog.text


def test_a_replay_that_skips_its_lists_is_noticed(folder):
    with driven_worker(folder, attention_backend="cpu") as driver:
        cases, recorder = GraphCases(driver), Recorder()
        runner = cases.graph_runner(SHAPES["decode"], make_backend=recorder)
        [sequence] = cases.sequences(1)
        assert cases.difference(runner, cases.decode([sequence])) == 0.0
        recorder.graphs[ShapeKey(1)].parts.clear()
        assert cases.difference(runner, cases.decode([sequence])) != 0.0


def test_recording_again_takes_no_more_memory(folder):
    with driven_worker(folder, attention_backend="cpu") as driver:
        cases, recorder = GraphCases(driver), Recorder()
        runner = cases.graph_runner(SHAPES["decode"], make_backend=recorder)
        arena = recorder.backends[-1].arena
        taken = arena.bytes
        assert taken > 0
        for _ in range(5):
            runner.graphs.recapture()
        assert recorder.backends[-1].arena is arena
        assert arena.bytes == taken
        assert max(cases.random_differences(SHAPES["decode"], runner)) == 0.0


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: int(x.sum()), "Tensor.__int__"),
        (lambda x: x[x > 0], "needs a value"),
        (lambda x: torch.nonzero(x), "needs a value"),
        (lambda x: x + torch.tensor([1.0]), "copies from the host"),
    ],
)
def test_code_that_reads_a_value_is_refused_by_name(read, said):
    x = torch.ones(3)

    def forward():
        read(x)
        return {}

    with (
        published_topology(ranks={"world_rank": 0, "dp_rank": None}, model_path="dummy"),
        pytest.raises(HostReadError, match=said),
    ):
        CpuGraphBackend().capture(ShapeKey(1), forward)

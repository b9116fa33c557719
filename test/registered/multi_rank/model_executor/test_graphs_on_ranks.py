"""Ranks that share a model replay one graph together, whatever each of them has to run."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="multi-rank-cpu")

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_graph_runner import DecodeGraphRunner
from sglang.srt.model_executor.runner.static_batch import ForwardShape
from sglang.srt.model_executor.runner_backend.cpu_graph import CpuGraphBackend
from sglang.srt.runtime_context import get_parallel
from sglang.test.fakes.graph_cases import GraphCases
from sglang.test.multi_rank import run_ranks
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import DrivenSequence, driven_worker

CLOSE = 1e-4
SHAPES = [ForwardShape(ForwardMode.DECODE, 1), ForwardShape(ForwardMode.TARGET_VERIFY, 3, tail=3)]
#: Requests of each replica in the steps of a run: the largest grows and shrinks, and each is idle once.
STEPS = [(1, 3), (4, 0), (2, 2), (0, 1), (3, 4)]


def agreed(counts: list[int], rows: list[int] | int, *, is_extend: bool = False) -> DpStep:
    """The step of replicas with so many requests, of which each has so many rows."""
    tokens = rows if isinstance(rows, list) else [count * rows for count in counts]
    return DpStep(tokens, counts if is_extend else tokens, is_extend=is_extend, num_requests=counts)


def prompts(cases: GraphCases, count: int) -> list[DrivenSequence]:
    """As many sequences on each replica, of 7 tokens each, in the cache."""
    sequences = []
    for _ in range(count):
        ids = [cases.number(3, 500) for _ in range(7)]
        sequences.append(cases.driver.add(ids))
        batch = cases.driver.batch([(sequences[-1], 7)])
        replicas = get_parallel().attn_dp_size
        if replicas > 1:
            batch.dp_step = agreed([1] * replicas, 7, is_extend=True)
        cases.runner.forward(batch)
    return sequences


def differences(rank: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """How far steps over graphs are from eager ones on this rank, and which graphs it replayed."""
    with driven_worker(model, rank=rank, **layout) as driver:
        replica = get_parallel().attn_dp_rank if get_parallel().attn_dp_size > 1 else 0
        cases = GraphCases(driver, seed=replica)  # the ranks of a replica run the same requests
        sequences = prompts(cases, 4)
        worst = 0.0
        for shape in SHAPES:
            runner = cases.graph_runner(shape)
            for counts in STEPS:
                worst = max(worst, step_difference(cases, runner, sequences, counts, replica))
        return {
            "worst": worst,
            "sizes": [[key.size for key in backend.replays] for backend in cases.backends],
        }


def list_differences(rank: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """The same over lists of kernel calls, and which operations a replay runs from Python."""
    with driven_worker(model, rank=rank, attention_backend="cpu", **layout) as driver:
        replica = get_parallel().attn_dp_rank if get_parallel().attn_dp_size > 1 else 0
        cases = GraphCases(driver, seed=replica)
        sequences = prompts(cases, 4)
        backends: list[CpuGraphBackend] = []

        def make_backend() -> CpuGraphBackend:
            backends.append(CpuGraphBackend())
            return backends[-1]

        worst = 0.0
        for shape in SHAPES:
            runner = cases.graph_runner(shape, make_backend=make_backend)
            for counts in STEPS:
                worst = max(worst, step_difference(cases, runner, sequences, counts, replica))
        graphs = [graph for backend in backends for graph in backend.graphs.values()]
        return {
            "worst": worst,
            "from_python": sorted({name for graph in graphs for name in graph.from_python}),
        }


def step_difference(
    cases: GraphCases,
    runner: DecodeGraphRunner,
    sequences: list[DrivenSequence],
    counts: tuple[int, ...],
    replica: int,
) -> float:
    """One step in which this replica has `counts[replica]` requests; a lone replica never idles."""
    replicas, width = get_parallel().attn_dp_size, runner.shape.width
    count = counts[replica] if replicas > 1 else max(counts)
    step = agreed(list(counts), width) if replicas > 1 else None
    if count == 0:
        assert step is not None
        batch = ForwardBatch.idle(step, torch.device("cpu"))
    elif width > 1:
        batch = cases.verify(sequences[:count], width, trees=True)
    else:
        batch = cases.decode(sequences[:count])
    batch.dp_step = step
    assert runner.can_run(batch)
    return cases.difference(runner, batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tp_size": 2}),
    "replicas": (2, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
    "replicas-of-two": (4, {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_over_graphs_equal_eager_ones_on_every_rank(model: Path, name: str) -> None:
    """Decode steps, then rounds of trees; all ranks replay the same sizes."""
    ranks, layout = LAYOUTS[name]
    answers = run_ranks(differences, world_size=ranks, model=str(model), layout=layout)
    assert max(answer["worst"] for answer in answers) < CLOSE
    assert all(answer["sizes"] == [[4, 4, 2, 1, 4]] * len(SHAPES) for answer in answers)


@pytest.mark.skipif(compiled_kernels() is None, reason="the compiled kernels are not used")
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_from_lists_equal_eager_ones_and_exchanges_are_entries_of_them(model: Path, name: str) -> None:
    ranks, layout = LAYOUTS[name]
    answers = run_ranks(list_differences, world_size=ranks, model=str(model), layout=layout)
    assert max(answer["worst"] for answer in answers) < CLOSE
    exchanged = {"c10d", "allreduce_", "alltoall_base_", "_allgather_base_"}
    for answer in answers:
        assert not exchanged & set(answer["from_python"]), answer["from_python"]
        if name == "tensor":
            assert answer["from_python"] == ["cat"]  # the shares of the head's scores

"""Graphs are captured largest first with barriers of the scope in force, fail by name, and are made again."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import contextlib

import pytest
import torch
from torch import nn

from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs, Recipe, recapture_all
from sglang.srt.model_executor.runner_backend.base import GraphBackend, ShapeKey
from sglang.srt.model_executor.runner_utils.capture_mode import is_capturing
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.test_utils import published_topology


class ListedBackend(GraphBackend):
    """Writes down what is asked of it, with the group of the scope in which it was made."""

    def __init__(self, log, *, fails_at=None):
        super().__init__()
        self.log = log
        self.fails_at = fails_at
        self.kept = set()

    def barrier(self):
        super().barrier()
        self.log.append(("barrier", self.tp_group))

    def synchronize(self):
        self.log.append("synchronize")

    def session(self):
        return contextlib.nullcontext()

    def capture(self, key, fn):
        self.log.append(("capture", key.size))
        if key.size == self.fails_at:
            raise MemoryError("aten::bmm found no memory")
        fn()
        self.kept.add(key)

    def replay(self, key):
        assert key in self.kept
        return {}

    def drop(self):
        self.log.append("drop")
        self.kept.clear()


class Graphs:
    """Captured graphs of a model of one weight, whose forward writes down where it runs."""

    def __init__(self, name="target", sizes=(2, 1, 4), *, log=None, fails_at=None, **recipe):
        self.log = [] if log is None else log
        self.model = nn.Linear(2, 2)
        self.captured = CapturedGraphs(
            Recipe(
                name=name,
                prepare=lambda size: self.log.append(("prepare", size)),
                forward=self.forward,
                model=self.model,
                make_backend=lambda: ListedBackend(self.log, fails_at=fails_at),
                **recipe,
            ),
            sizes,
        )

    def forward(self, size):
        self.log.append(("forward", size, is_capturing(), get_parallel().tp_size))
        return {}


@pytest.fixture
def two_replicas(monkeypatch):
    """Rank 0 of a tensor group of four that holds two attention replicas."""
    fields = {"model_path": "dummy", "tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}, **fields):
        target, attention = FakeGroup(4), FakeGroup(2)
        monkeypatch.setattr(parallel_state, "_TP", target)
        monkeypatch.setattr(parallel_state, "_ATTN_TP", attention)
        monkeypatch.setattr(parallel_state, "_SELF_PP", FakeGroup(1))
        yield target, attention


@pytest.fixture
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}, model_path="dummy"):
        yield


def test_each_size_is_warmed_up_twice_and_the_largest_comes_first(one_rank):
    graphs = Graphs(sizes=(1, 2))
    graphs.captured.capture()
    wait = ["synchronize", ("barrier", None)]
    expected = []
    for size in (2, 1):
        run = ("forward", size, True, 1)
        expected += [("prepare", size), *wait, run, *wait, run, *wait, ("capture", size), run]
    assert graphs.log == expected
    assert not is_capturing()


def test_no_graph_serves_before_capture_and_after_drop(one_rank):
    graphs = Graphs()
    assert graphs.captured.size_for(1) is None
    with pytest.raises(RuntimeError, match="target: no graph is captured; call capture"):
        graphs.captured.replay(1)
    graphs.captured.capture()
    assert [graphs.captured.size_for(count) for count in range(6)] == [1, 1, 2, 4, 4, None]
    graphs.captured.replay(4)
    graphs.captured.drop()
    assert graphs.captured.size_for(1) is None and graphs.log[-1] == "drop"
    graphs.captured.drop()
    assert graphs.log.count("drop") == 1


def test_a_failed_capture_names_size_and_cures_and_leaves_capture_mode(one_rank):
    graphs = Graphs(fails_at=2)
    with pytest.raises(
        RuntimeError,
        match=r"target: capturing a graph of 2 requests failed: aten::bmm found no memory; try .*"
        r"--mem-fraction-static.*--cuda-graph-max-bs-decode.*--cuda-graph-backend-decode disabled",
    ):
        graphs.captured.capture()
    assert not is_capturing()
    assert graphs.captured.size_for(1) is None and graphs.log[-1] == "drop"


def test_a_draft_captures_with_the_group_of_its_scope_and_recaptures_with_the_targets(two_replicas):
    target, attention = two_replicas
    log = []
    scope = lambda: draft_tp_context(owns_attention=True)  # noqa: E731
    draft = Graphs("draft", (1,), log=log, scope=scope)
    with draft_tp_context(owns_attention=True):
        draft.captured.capture()
    assert {entry[1] for entry in log if entry[0] == "barrier"} == {attention}
    assert {entry[3] for entry in log if entry[0] == "forward"} == {2}
    assert attention.calls["barrier"] == 3 and not target.calls
    log.clear()
    recapture_all([draft.captured])
    assert {entry[1] for entry in log if entry[0] == "barrier"} == {target}
    assert {entry[3] for entry in log if entry[0] == "forward"} == {2}  # a model runs in its own placement
    assert target.calls["barrier"] == 3


def test_recapture_drops_all_old_graphs_before_the_first_new_one(two_replicas):
    log = []
    runners = [Graphs("target", (2, 1), log=log), Graphs("draft", (1,), log=log)]
    for graphs in runners:
        graphs.captured.capture()
    log.clear()
    recapture_all([graphs.captured for graphs in runners])
    steps = [entry for entry in log if entry == "drop" or entry[0] == "capture"]
    assert steps == ["drop", "drop", ("capture", 2), ("capture", 1), ("capture", 1)]


def test_a_runner_without_graphs_is_skipped_without_a_barrier(two_replicas):
    target, attention = two_replicas
    graphs = Graphs(sizes=(1,)).captured
    recapture_all([None, graphs])  # the second has none either: memory was short
    assert not target.calls and not attention.calls
    graphs.capture()
    recapture_all([graphs, None])
    assert target.calls["barrier"] == 3 + 3


def test_recapture_inside_a_draft_scope_is_refused(two_replicas):
    graphs = Graphs(sizes=(1,))
    with (
        draft_tp_context(owns_attention=True),
        pytest.raises(RuntimeError, match=r"recapture_all\(\) inside an open parallel scope"),
    ):
        recapture_all([graphs.captured])
    assert not graphs.log


def test_a_weight_that_moved_is_named_and_one_that_changed_in_place_is_not(one_rank):
    graphs = Graphs()
    graphs.captured.check_addresses()
    graphs.captured.capture()
    with torch.no_grad():
        graphs.model.weight.add_(1)
    graphs.captured.check_addresses()
    graphs.model.bias = nn.Parameter(graphs.model.bias.detach().clone())
    with pytest.raises(RuntimeError, match=r"weight bias moved since capture; .*recapture_cuda_graph=true"):
        graphs.captured.check_addresses()
    graphs.captured.recapture()
    graphs.captured.check_addresses()


def test_keys_of_one_size_differ_by_variant():
    assert ShapeKey(2) == ShapeKey(2) != ShapeKey(2, "greedy")

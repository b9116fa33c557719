"""The tape bakes addresses and numbers, spoils what lies between and refuses the host, as a graph does."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest
import torch

from sglang.srt.model_executor.runner_backend.base import ShapeKey
from sglang.srt.model_executor.runner_utils.recorded_step import HostReadError
from sglang.test.fakes.graph_tape import TapeBackend, TapePool
from sglang.test.test_utils import published_topology

KEY = ShapeKey(1)


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}, model_path="dummy"):
        yield


def masked_sums(values, lengths):
    """A small step that reads lengths as tensors: the sum of the first so many values of each row."""
    places = torch.arange(values.shape[1])
    kept = torch.where(places < lengths[:, None], values, torch.zeros(()))
    return kept.sum(dim=1)


def test_correct_code_replays_on_new_values():
    backend, values, lengths = TapeBackend(), torch.randn(3, 8), torch.tensor([8, 3, 1])
    backend.capture(KEY, lambda: {"sums": masked_sums(values, lengths)})
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        values.copy_(torch.randn(3, 8, generator=draw))
        lengths.copy_(torch.randint(0, 9, (3,), generator=draw))
        assert torch.equal(backend.replay(KEY)["sums"], masked_sums(values, lengths))


def test_a_length_in_python_is_baked():
    backend, values, longest = TapeBackend(), torch.randn(3, 8), 8
    backend.capture(KEY, lambda: {"sums": values[:, :longest].sum(dim=1)})
    longest = 2
    assert torch.equal(backend.replay(KEY)["sums"], values.sum(dim=1))


def test_an_input_that_is_bound_anew_is_not_seen():
    backend, inputs = TapeBackend(), {"x": torch.ones(2)}
    backend.capture(KEY, lambda: {"y": inputs["x"] * 2})
    inputs["x"] = torch.full((2,), 5.0)
    assert backend.replay(KEY)["y"].tolist() == [2, 2]


def test_an_output_does_not_outlive_the_replay_of_another_graph_of_the_pool():
    pool, x = TapePool(), torch.ones(2)
    first, second = TapeBackend(pool), TapeBackend(pool)
    first.capture(KEY, lambda: {"y": x * 2})
    second.capture(KEY, lambda: {"y": x * 3})
    kept = first.replay(KEY)["y"]
    assert kept.tolist() == [2, 2]
    second.replay(KEY)
    assert kept.isnan().all()


def test_memory_that_nobody_writes_is_not_a_number():
    backend, x = TapeBackend(), torch.ones(2)

    def forgets_a_row():
        out = torch.empty(2)
        out[:1].copy_(x[:1])
        return {"y": out}

    backend.capture(KEY, forgets_a_row)
    y = backend.replay(KEY)["y"]
    assert y[0] == 1 and y[1].isnan()


def test_writes_into_static_tensors_and_views_are_replayed():
    backend, cache, x = TapeBackend(), torch.zeros(4, 2), torch.ones(2)
    slot = torch.tensor([1])

    def store():
        cache[:, :1].index_copy_(0, slot, x[None, :1])
        return {"rows": cache.view(-1)[2:4]}

    backend.capture(KEY, store)
    cache.zero_()
    slot.fill_(3)
    x.fill_(7)
    backend.replay(KEY)
    assert cache.tolist() == [[0, 0], [0, 0], [0, 0], [7, 0]]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("item", lambda x: x.max().item()),
        ("__int__", lambda x: int(x.max())),
        ("__bool__", lambda x: bool(x.max() > 0)),
        ("__index__", lambda x: range(x.max())),
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
        (r"torch.tensor\(\.\.\.\)", lambda x: x + torch.tensor([1, 2])),
    ],
)
def test_asking_the_device_for_a_value_is_refused_by_name(name, read):
    x = torch.tensor([1, 2])

    def asks():
        read(x)
        return {"y": x + 1}

    asks()
    with pytest.raises(HostReadError, match=name):
        TapeBackend().capture(KEY, asks)


def test_dropped_graphs_leave_the_pool():
    pool = TapePool()
    backend = TapeBackend(pool)
    backend.capture(KEY, lambda: {"y": torch.ones(2) * 2})
    backend.drop()
    assert not pool.tapes and not backend.tapes

"""Small attention stays on one thread and hands the others back, whatever happens."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest
import torch

from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.torch_native_backend import _attend
from sglang.srt.layers.attention.torch_native_plan import PaddedRows


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs():
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(6, rows, 16, generator=draw) for rows in (3, 40, 40))


def planned(mask=None):
    """Three requests of one row and 40 keys, over two kv heads with three query heads each."""
    return PaddedRows(3, 1, 40, None, torch.empty(0), mask)


@pytest.mark.parametrize("masked", [False, True])
def test_one_thread_or_all_give_the_attention_of_the_formula(monkeypatch, masked):
    q, k, v = inputs()
    mask = torch.zeros(3, 1, 1, 40).index_fill_(3, torch.arange(30, 40), float("-inf")) if masked else None
    added = 0 if mask is None else mask.view(3, 1, 40).repeat(2, 1, 1)
    expected = ((q @ k.transpose(1, 2)) * 0.25 + added).softmax(-1) @ v
    for limit in (1 << 18, 0):
        monkeypatch.setattr(torch_native_backend, "_ONE_THREAD_KEYS", limit)
        assert (_attend(q, k, v, planned(mask), 0.25) - expected).abs().max() < 1e-5
        assert torch.get_num_threads() == 2


def test_small_work_sees_one_thread_and_large_work_all(monkeypatch):
    q, k, v = inputs()
    seen = []
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a: seen.append(torch.get_num_threads()) or plain(*a))
    _attend(q, k, v, planned(), 0.25)
    monkeypatch.setattr(torch_native_backend, "_ONE_THREAD_KEYS", 0)
    _attend(q, k, v, planned(), 0.25)
    assert seen == [1, 1, 2, 2]


def test_the_threads_come_back_after_an_error():
    q, k, v = inputs()
    with pytest.raises(RuntimeError):
        _attend(q, k[:, :, :5], v, planned(), 0.25)
    assert torch.get_num_threads() == 2

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import math

import pytest
import torch

from sglang.kernels import top_logprobs as module
from sglang.kernels.top_logprobs import AskedRow, top_logprobs


@pytest.fixture(params=[True, False], ids=["as installed", "in torch"])
def kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(module, "kernels_for", lambda logits: None)


def logits_of(vocab, rows=4):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocab", [1, 50, 4097, 49152])
def test_values_are_logarithms_of_probabilities_at_the_temperature(vocab):
    logits = logits_of(vocab)
    kept = logits.clone()
    asked = [
        AskedRow(2, 0.7, [0, vocab - 1, vocab // 2], 20),
        AskedRow(0, 1.0, [], 0),
        AskedRow(0, 3.0, [vocab // 3], 3),
    ]
    found = top_logprobs(logits, asked)
    assert torch.equal(logits, kept)
    for one, got in zip(asked, found, strict=True):
        exact = torch.log_softmax(logits[one.row].double() / one.temperature, dim=-1)
        ranked = exact.sort(descending=True, stable=True)
        count = min(one.top_num, vocab)
        assert got.own == pytest.approx(exact[list(one.token_ids)].tolist(), rel=1e-6, abs=1e-5)
        assert got.top == pytest.approx(ranked.values[:count].tolist(), rel=1e-6, abs=1e-5)
        assert got.top_ids == ranked.indices[:count].tolist()


@pytest.mark.usefixtures("kernels")
def test_the_lower_id_comes_first_among_equals_also_where_the_list_ends():
    logits = logits_of(3000).round()
    for row, one in zip(
        logits, top_logprobs(logits, [AskedRow(at, 1.0, [], 700) for at in range(4)]), strict=True
    ):
        assert one.top_ids == row.sort(descending=True, stable=True).indices[:700].tolist()
    (ties,) = top_logprobs(torch.zeros(1, 90), [AskedRow(0, 1.0, [], 5)])
    assert ties.top_ids == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("kernels")
def test_a_tiny_temperature_leaves_one_token_and_masked_ones_are_minus_infinity():
    logits = logits_of(50, rows=1)
    logits[0, 9] = -math.inf
    best = int(logits.argmax())
    (found,) = top_logprobs(logits, [AskedRow(0, 1e-6, [best, 9], 1)])
    assert found.own == [0.0, -math.inf] and found.top == [0.0] and found.top_ids == [best]


def test_nothing_asked_gives_nothing():
    assert top_logprobs(logits_of(9), []) == []

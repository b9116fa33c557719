from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest
import torch

from sglang.kernels import draft_trees
from sglang.kernels.compiled import compiled_kernels
from sglang.kernels.draft_trees import (
    best_children,
    choose_nodes,
    follow_best,
    grow_level,
    no_candidates,
    root_frontier,
    tree_mask,
)


@pytest.fixture
def both(monkeypatch):
    """Calls a function as installed and in torch, and gives both results."""
    if compiled_kernels() is None:
        pytest.skip("sgl_kernel is not used: there is one way only")

    def call(compute):
        installed = compute()
        with monkeypatch.context() as patch:
            patch.setattr(draft_trees, "_kernels", lambda tensor: None)
            return installed, compute()

    return call


def same(first, second):
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def grown(batch, topk, levels, num_nodes, *, is_root_in_tail, seed):
    """A tree grown by probabilities of which many are equal, and all that was kept on the way."""
    draw = torch.Generator().manual_seed(seed)
    roots = torch.randint(0, 99, (batch,), generator=draw)
    frontier = root_frontier(roots, is_in_tail=is_root_in_tail)
    candidates = no_candidates(batch, topk + (levels - 1) * topk * topk, roots.device)
    seen, first = [], 0
    for _ in range(levels):
        rows = frontier.ids.shape[1]
        ids = torch.randint(0, 99, (batch, rows, topk), generator=draw)
        probs = torch.rand(batch, rows, topk, generator=draw).mul(4).round().div(4)
        frontier = grow_level(ids, probs, frontier, first, candidates)
        first += rows * topk
        seen += frontier
    nodes = choose_nodes(roots, candidates, num_nodes)
    return [*seen, *candidates, *nodes, *tree_mask(nodes[1])]


@pytest.mark.parametrize(
    ("batch", "topk", "levels", "num_nodes"),
    [(1, 4, 5, 8), (16, 4, 5, 8), (3, 2, 3, 11), (2, 8, 1, 3), (2, 1, 4, 5), (0, 3, 2, 4)],
)
@pytest.mark.parametrize("is_root_in_tail", [False, True])
def test_trees_grow_alike_with_and_without_the_kernels(both, batch, topk, levels, num_nodes, is_root_in_tail):
    for seed in range(5):
        same(
            *both(
                lambda seed=seed: grown(
                    batch, topk, levels, num_nodes, is_root_in_tail=is_root_in_tail, seed=seed
                )
            )
        )


def test_the_best_children_are_the_same_and_as_probable(both):
    logits = torch.randn(6, 8192, generator=torch.Generator().manual_seed(0)) * 3
    (ids, probs), (wanted_ids, wanted_probs) = both(lambda: best_children(logits, 4))
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(probs, wanted_probs, rtol=1e-5, atol=1e-7)


def test_the_greedy_way_is_the_same(both):
    batch, nodes, vocab = 6, 8, 70
    draw = torch.Generator().manual_seed(5)
    links = [-1, 0, 0, 1, 1, 2, 3, 6]
    parents = torch.tensor([links] * batch)
    token_ids = torch.randint(0, vocab, (batch, nodes), generator=draw)
    logits = torch.randn(batch * nodes, vocab, generator=draw)
    for b in range(batch):
        for node in (1, 3, 6)[: b % 4]:
            logits[b * nodes + links[node], token_ids[b, node]] = 9.0
    logits[2 * nodes, 9], logits[3 * nodes + 1 : 4 * nodes, 0] = float("nan"), float("inf")
    installed, in_torch = both(lambda: follow_best(logits, token_ids, parents, [5, 0, 2, 3]))
    assert installed == in_torch
    assert [(path.nodes, path.failed) for path in installed] == [
        ([0, 1], False),
        ([0], False),
        ([], True),
        ([0], True),
    ]

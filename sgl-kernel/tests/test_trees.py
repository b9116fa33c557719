"""Trees of drafts against plain loops: growth, nodes, masks, and the greedy way."""

import math
import random

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.trees import (
    Candidates,
    Level,
    choose_nodes,
    follow_best,
    grow_level,
    tree_mask,
)

SHAPES = [(1, 4, 5), (3, 1, 4), (2, 3, 2), (16, 2, 3), (0, 4, 2)]  # requests, k, levels


def level_of(batch, rows, tail, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (batch, rows), generator=draw)
    return Level(
        ids,
        torch.zeros_like(ids),
        torch.arange(rows).expand(batch, rows).contiguous() - int(rows == 1),
        torch.rand(batch, rows, generator=draw),
        torch.rand(batch, rows, tail, generator=draw) < 0.5,
    )


def room(batch, count):
    ids = torch.full((batch, count), -7)
    return Candidates(ids, torch.full((batch, count), -7.0), ids.clone())


@pytest.mark.parametrize(("batch", "topk", "tail"), SHAPES)
@pytest.mark.parametrize("is_root", [True, False])
def test_a_level_holds_the_children_and_the_best_go_on(batch, topk, tail, is_root):
    rows = 1 if is_root else topk
    level = level_of(batch, rows, 0 if is_root else tail, seed=batch)
    draw = torch.Generator().manual_seed(topk)
    token_ids = torch.randint(0, 99, (batch, rows * topk), generator=draw)
    probs = torch.rand(batch, rows * topk, generator=draw).mul(4).round().div(4)  # many are equal
    if batch:
        probs[0, 0] = math.nan
        probs[-1, -1] = 1.5
    first, into = 2, room(batch, 2 + rows * topk + 1)
    grown = grow_level(token_ids, probs, level, first, into, topk)
    for b in range(batch):
        scores = []
        for i in range(rows * topk):
            p = probs[b, i].item()
            p = torch.tensor(0.0 if math.isnan(p) else min(max(p, 0.0), 1.0))
            scores.append((level.scores[b, i // topk] * p).item())
            assert into.parents[b, first + i] == level.candidates[b, i // topk]
        assert into.ids[b, first : first + rows * topk].tolist() == token_ids[b].tolist()
        assert into.scores[b, first : first + rows * topk].tolist() == scores
        best = sorted(range(rows * topk), key=lambda i: (-scores[i], i))[:topk]
        assert grown.ids[b].tolist() == [int(token_ids[b, i]) for i in best]
        assert grown.rows[b].tolist() == [i // topk for i in best]
        assert grown.candidates[b].tolist() == [first + i for i in best]
        assert grown.scores[b].tolist() == [scores[i] for i in best]
        for j, i in enumerate(best):
            itself = [at == j for at in range(topk)]
            assert grown.seen[b, j].tolist() == level.seen[b, i // topk].tolist() + itself
    for one in into:  # the rest stays
        assert bool((one[:, :first] == -7).all()) and bool((one[:, -1] == -7).all())


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 21])
def test_the_best_candidates_become_nodes_in_their_order(num_nodes):
    batch, count = 5, 20
    draw = random.Random(num_nodes)
    parents = torch.tensor([[draw.randrange(-1, i) for i in range(count)] for _ in range(batch)])
    scores = torch.ones(batch, count)
    for b in range(batch):
        for i in range(count):
            above = 1.0 if parents[b, i] < 0 else scores[b, parents[b, i]].item()
            scores[b, i] = above * draw.choice([0.5, 1.0])
    candidates = Candidates(torch.arange(batch * count).view(batch, count), scores, parents)
    roots = torch.arange(batch) + 1000
    ids, links = choose_nodes(roots, candidates, num_nodes)
    for b in range(batch):
        chosen = sorted(sorted(range(count), key=lambda i: (-scores[b, i].item(), i))[: num_nodes - 1])
        node_of = {-1: 0, **{place: node for node, place in enumerate(chosen, 1)}}
        assert ids[b].tolist() == [1000 + b, *(b * count + i for i in chosen)]
        assert links[b].tolist() == [-1, *(node_of[int(parents[b, i])] for i in chosen)]


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 8), (2, 65), (0, 4), (4, 0)])
def test_a_node_sees_itself_and_its_ancestors(batch, nodes):
    draw = random.Random(nodes)
    parents = [[draw.randrange(-1, i) if i else -1 for i in range(nodes)] for _ in range(batch)]
    mask, depths = tree_mask(torch.tensor(parents, dtype=torch.int64).view(batch, nodes))
    for b in range(batch):
        for i in range(nodes):
            path, at = [], i
            while at >= 0:
                path.append(at)
                at = parents[b][at]
            assert mask[b, i].tolist() == [j in path for j in range(nodes)]
            assert depths[b, i] == len(path) - 1


FOLLOW = """
from sgl_kernel.trees import follow_best
for case in cases:
    answers.append(follow_best(*case))
"""


def test_the_best_tokens_lead_down_to_where_no_child_carries_one(level, tmp_path):
    batch, nodes, vocab = 7, 6, 300
    draw = random.Random(1)
    parents = [[-1] + [draw.randrange(i) for i in range(1, nodes)] for _ in range(batch)]
    token_ids = torch.randint(0, vocab, (batch, nodes), generator=torch.Generator().manual_seed(3))
    whole = torch.randn(batch * nodes, vocab + 20, generator=torch.Generator().manual_seed(4))
    logits = whole[:, :vocab]  # with a gap between rows
    for b in range(batch):
        for i in range(1, nodes - 1):
            logits[b * nodes + parents[b][i], token_ids[b, i]] = 30.0
    token_ids[2, 1:] = token_ids[2, 1]  # all the same: the first one counts
    logits[3 * nodes, 5] = math.nan  # at once
    logits[4 * nodes + 1 : 5 * nodes, 5] = math.inf  # behind the root
    links = torch.tensor(parents)
    for requests in ([0, 1, 2, 3, 4, 5, 6], [6, 2], []):
        who = torch.tensor(requests, dtype=torch.int64)
        ((paths, drawn, ends),) = answers_at(level, FOLLOW, [(logits, token_ids, links, who)], tmp_path)
        for at, b in enumerate(requests):
            path, ids, node, failed = [], [], 0, False
            while node is not None:
                row = logits[b * nodes + node]
                if not row.isfinite().all():
                    failed = True
                    break
                path.append(node)
                ids.append(int(row.argmax()))
                fits = (i for i in range(nodes) if parents[b][i] == node and token_ids[b, i] == ids[-1])
                node = next(fits, None)
            assert ends[at].tolist() == [len(path), int(failed)]
            assert paths[at, : len(path)].tolist() == path and drawn[at, : len(path)].tolist() == ids


LONGS = torch.zeros(2, dtype=torch.int64)
TREE = torch.tensor([[-1, 0]])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tree_mask(torch.tensor([[-1, 1]])), "a parent stands before its child, got 1 for node 1"),
        (lambda: tree_mask(TREE.int()), "parents is contiguous int64"),
        (lambda: grow_level(TREE, torch.ones(1, 2), level_of(1, 1, 0, 0), 0, room(1, 1), 2), "has room"),
        (lambda: grow_level(TREE, torch.ones(1, 3), level_of(1, 1, 0, 0), 0, room(1, 2), 2), "probs is"),
        (lambda: choose_nodes(LONGS[:1], room(1, 2), 4), "4 nodes of a root and 2 candidates"),
        (
            lambda: choose_nodes(LONGS[:1], Candidates(TREE, torch.ones(1, 2), TREE + 1), 3),
            "a parent stands before its child",
        ),
        (lambda: follow_best(torch.ones(3, 5), TREE, TREE, LONGS), r"\[batch \* nodes, vocab\]"),
        (lambda: follow_best(torch.ones(2, 5), TREE, TREE, LONGS + 1), "requests are 0 to 0, got 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, said):
    with pytest.raises(RuntimeError, match=said):
        call()


def test_the_operators_keep_torchs_rules():
    ops = torch.ops.sgl_kernel
    level, into = level_of(2, 3, 4, seed=0), room(2, 9)
    grown = level_of(2, 3, 7, seed=1)
    ids = torch.zeros(2, 9, dtype=torch.int64)
    torch.library.opcheck(
        ops.grow_level.default,
        (ids, torch.rand(2, 9), level.scores, level.candidates, level.seen, 0, *into, *grown),
    )
    outs = torch.zeros(2, 2, 4, dtype=torch.int64)
    into.parents.fill_(-1)
    torch.library.opcheck(ops.choose_nodes.default, (LONGS, *into, *outs))
    torch.library.opcheck(
        ops.tree_mask.default, (TREE, torch.zeros(1, 2, 2, dtype=torch.bool), torch.zeros_like(TREE))
    )
    torch.library.opcheck(
        ops.follow_best.default,
        (torch.rand(2, 9), TREE, TREE, LONGS[:1], torch.zeros_like(TREE), torch.zeros_like(TREE), TREE + 1),
    )

"""The beam and the choice of its best nodes, against a reference of linked objects."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.kernels import draft_trees
from sglang.srt.speculative.draft_tree import DraftBeam, DraftShape

#: Few values, so that equal scores are the rule, and many; products of four are exact here and in float32.
TIED = [0.0, 0.25, 0.5, 1.0]
FINE = [value / 64 for value in range(65)]
BROKEN = [math.nan, math.inf, -math.inf, -1.0, 2.0, 0.5]


@dataclass(eq=False)
class Node:
    token_id: int
    score: float
    parent: "Node | None"
    row: int = -1  # on its frontier

    def path(self):
        return [*(self.parent.path() if self.parent else []), self]


def best(nodes, count):
    """By repeated search for the highest score, the first of equals."""
    left, found = list(nodes), []
    for _ in range(count):
        top = max(node.score for node in left)
        found.append(next(node for node in left if node.score == top))
        left.remove(found[-1])
    return found


def reference(shape, levels, root_in_tail):
    """One request: (token, parent row, tail mask row) of each level's frontier, then tokens and parents.

    `levels`: for each level [rows][k] pairs of token and probability.
    """
    frontier, recorded, tail, frontiers = [None], [], [None] if root_in_tail else [], []
    for level in levels:
        born = [
            Node(token, (parent.score if parent else 1.0) * p, parent)
            for parent, row in zip(frontier, level)
            for token, p in row
        ]
        recorded += born
        frontier = best(born, shape.topk)
        for row, node in enumerate(frontier):
            node.row = row
        tail = tail + frontier
        frontiers.append(
            [
                (
                    node.token_id,
                    node.parent.row if node.parent else 0,
                    [other is None or other in node.path() for other in tail],
                )
                for node in frontier
            ]
        )
    chosen = best(recorded, shape.num_nodes - 1)
    nodes = [None, *(node for node in recorded if node in chosen)]
    return frontiers[:-1], [node.token_id for node in nodes[1:]], [nodes.index(n.parent) for n in nodes[1:]]


def draw_levels(shape, batch, seed, values):
    """Distinct tokens, and probabilities drawn from `values`: two tensors [batch, rows, k] a level."""
    generator = torch.Generator().manual_seed(seed)
    levels, first = [], 100
    for level in range(shape.num_steps):
        size = (batch, shape.topk if level else 1, shape.topk)
        probs = torch.tensor(values)[torch.randint(len(values), size, generator=generator)]
        levels.append((torch.arange(first, first + probs.numel()).view(size), probs))
        first += probs.numel()
    return levels


def check(shape, levels, root_in_tail, beam_class=DraftBeam):
    """The beam says at each level and at the end what the reference says for every request alone."""
    batch = levels[0][0].shape[0]
    beam = beam_class(shape, torch.arange(batch), root_in_tail=root_in_tail)
    expected = [
        reference(shape, [list(zip_rows(t[b], p[b])) for t, p in levels], root_in_tail) for b in range(batch)
    ]
    for level, (token_ids, probs) in enumerate(levels):
        if level:
            frontier = beam.frontier
            parts = (frontier.token_ids, frontier.parent_rows, frontier.tail_mask)
            said = [list(zip(*rows)) for rows in zip(*(part.tolist() for part in parts))]
            assert said == [frontiers[level - 1] for frontiers, _, _ in expected]
        beam.grow(token_ids.reshape(-1, shape.topk), probs.reshape(-1, shape.topk))
    tree = beam.tree()
    assert tree.token_ids.tolist() == [[b, *token_ids] for b, (_, token_ids, _) in enumerate(expected)]
    assert tree.parents.tolist() == [[-1, *parents] for _, _, parents in expected]
    assert not tree.is_chain


def zip_rows(token_ids, probs):
    for token_row, prob_row in zip(token_ids.tolist(), probs.tolist()):
        yield list(zip(token_row, prob_row))


@st.composite
def shapes(draw):
    topk, num_steps = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    most = 1 + topk + (num_steps - 1) * topk * topk
    return DraftShape(topk, num_steps, draw(st.integers(2, most)))


SEEDS = st.integers(0, 2**31)


@given(shapes(), st.integers(1, 3), SEEDS, st.sampled_from([TIED, FINE]), st.booleans())
def test_every_frontier_tail_mask_and_tree_is_what_the_reference_says(
    shape, batch, seed, values, root_in_tail
):
    check(shape, draw_levels(shape, batch, seed, values), root_in_tail)


def test_probability_one_everywhere_gives_the_first_branches_and_no_orphan():
    """All candidates are equal: the tree is the first N - 1, and each parent is among them."""
    shape = DraftShape(topk=3, num_steps=3, num_nodes=8)
    levels = draw_levels(shape, 2, 0, [1.0])
    check(shape, levels, root_in_tail=False)
    beam = DraftBeam(shape, torch.tensor([7, 8]))
    for token_ids, probs in levels:
        beam.grow(token_ids, probs)
    assert beam.tree().parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2]] * 2


@given(shapes(), SEEDS)
def test_a_broken_draft_still_gives_trees_with_all_parents(shape, seed):
    """NaN sorts above every number: a child could come in without its parent, and its link would lie."""
    levels = draw_levels(shape, 2, seed, BROKEN)
    beam = DraftBeam(shape, torch.tensor([7, 8]))
    parent_of = {}
    for token_ids, probs in levels:
        for frontier_row, children in zip(beam.frontier.token_ids.view(-1), token_ids.view(-1, shape.topk)):
            parent_of |= dict.fromkeys(children.tolist(), frontier_row.item())
        beam.grow(token_ids, probs)
    tree = beam.tree()
    for token_ids, parents in zip(tree.token_ids.tolist(), tree.parents.tolist()):
        assert [token_ids[parent] for parent in parents[1:]] == [parent_of[t] for t in token_ids[1:]]
        assert all(parent < node for node, parent in enumerate(parents))


def later_first(scores, count):
    """Offender: an order in which the later of equals comes first, as an unstable top-k may give it."""
    width = scores.shape[1]
    return width - 1 - scores.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :count]


def test_an_order_that_prefers_the_later_of_equals_is_noticed(monkeypatch):
    shape = DraftShape(topk=2, num_steps=3, num_nodes=5)
    check(shape, draw_levels(shape, 1, 3, [1.0]), root_in_tail=False)
    monkeypatch.setattr(draft_trees, "_kernels", lambda tensor: None)
    monkeypatch.setattr(draft_trees, "_best", later_first)
    with pytest.raises(AssertionError):
        check(shape, draw_levels(shape, 1, 3, [1.0]), root_in_tail=False)
    check(shape, [(t, p / (1 + t)) for t, p in draw_levels(shape, 1, 3, [1.0])], root_in_tail=False)


class SeesCousins(DraftBeam):
    """Offender: keeps the rows of the branch when a node moves to another branch."""

    def grow(self, token_ids, probs=None):
        branches = self._frontier.seen
        super().grow(token_ids, probs)
        if branches.shape[1] > 1:  # not the root
            own = self._frontier.seen[:, :, branches.shape[2] :]
            self._frontier = self._frontier._replace(seen=torch.cat([branches, own], dim=2))


def test_a_node_that_sees_its_cousins_row_is_noticed():
    """Both children of the second branch are the next frontier, so the first row changes its branch."""
    shape = DraftShape(topk=2, num_steps=3, num_nodes=5)
    levels = draw_levels(shape, 1, 0, [0.5])
    levels[1][1][0] = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    check(shape, levels, root_in_tail=True)
    with pytest.raises(AssertionError):
        check(shape, levels, root_in_tail=True, beam_class=SeesCousins)


def test_the_example_of_the_docstring():
    beam = DraftBeam(DraftShape(topk=2, num_steps=3, num_nodes=5), torch.tensor([9]))
    assert beam.frontier.token_ids.tolist() == [[9]] and beam.frontier.tail_mask is None
    beam.grow(torch.tensor([[10, 11]]), torch.tensor([[0.6, 0.4]]))
    assert beam.frontier.parent_rows.tolist() == [[0, 0]]
    assert beam.frontier.tail_mask.tolist() == [[[True, False], [False, True]]]
    beam.grow(torch.tensor([[12, 13], [14, 15]]), torch.tensor([[0.5, 0.3], [0.9, 0.1]]))
    assert beam.frontier.token_ids.tolist() == [[14, 12]]
    assert beam.frontier.parent_rows.tolist() == [[1, 0]]
    assert beam.frontier.tail_mask.int().tolist() == [[[0, 1, 1, 0], [1, 0, 0, 1]]]
    beam.grow(torch.tensor([[16, 17], [18, 19]]), torch.tensor([[0.8, 0.1], [0.2, 0.1]]))
    tree = beam.tree()
    assert tree.token_ids.tolist() == [[9, 10, 11, 12, 14]] and tree.parents.tolist() == [[-1, 0, 0, 1, 2]]


@pytest.mark.parametrize("root_in_tail", [False, True])
def test_one_branch_is_the_chain_of_its_tokens_and_reads_no_probability(root_in_tail):
    shape = DraftShape(topk=1, num_steps=3, num_nodes=4)
    beam = DraftBeam(shape, torch.tensor([1, 2]), root_in_tail=root_in_tail)
    for level in range(3):
        beam.grow(torch.tensor([[10 + level], [20 + level]]))
        assert beam.frontier.token_ids.tolist() == [[10 + level], [20 + level]]
        assert beam.frontier.parent_rows.tolist() == [[0], [0]] and beam.frontier.tail_mask is None
    tree = beam.tree()
    assert tree.is_chain
    assert tree.token_ids.tolist() == [[1, 10, 11, 12], [2, 20, 21, 22]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2


@pytest.mark.parametrize(("topk", "num_nodes"), [(1, 3), (3, 8)])
def test_a_replica_without_requests_grows_empty_trees(topk, num_nodes):
    beam = DraftBeam(DraftShape(topk, 2, num_nodes), torch.zeros(0, dtype=torch.int64))
    for _ in range(2):
        rows = 0 * beam.frontier.token_ids.shape[1]
        beam.grow(torch.zeros(rows, topk, dtype=torch.int64), torch.zeros(rows, topk))
    tree = beam.tree()
    assert tree.token_ids.shape == tree.parents.shape == (0, num_nodes)
    assert tree.ancestor_mask().shape == (0, num_nodes, num_nodes)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((0, 3, 4), "--speculative-eagle-topk must be 1 or more"),
        ((2, 0, 4), "--speculative-num-steps must be 1 or more"),
        ((2, 3, 1), "--speculative-num-draft-tokens must be 2 or more"),
        ((1, 3, 5), r"must be --speculative-num-steps \+ 1 with one branch a step: 4, and is 5"),
        (
            (2, 3, 12),
            "must be 11 or less, and is 12: --speculative-eagle-topk 2 and --speculative-num-steps 3",
        ),
    ],
)
def test_a_tree_that_cannot_have_its_nodes_is_refused_at_the_door(shape, says):
    with pytest.raises(ValueError, match=says):
        DraftShape(*shape)


def test_the_largest_tree_holds_every_candidate():
    shape = DraftShape(topk=2, num_steps=3, num_nodes=11)
    check(shape, draw_levels(shape, 2, 5, TIED), root_in_tail=True)


def test_levels_come_in_order_and_all_of_them():
    beam = DraftBeam(DraftShape(topk=2, num_steps=1, num_nodes=3), torch.tensor([9]))
    with pytest.raises(RuntimeError, match="has 0; grow the others first"):
        beam.tree()
    with pytest.raises(RuntimeError, match="chosen by probabilities"):
        beam.grow(torch.tensor([[1, 2]]))
    beam.grow(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))
    with pytest.raises(RuntimeError, match="take the tree first"):
        beam.grow(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))

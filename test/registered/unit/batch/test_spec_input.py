from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.batch.spec_input import DraftTree


def closure(parents):
    """Walks every node up to the root, one link at a time."""
    seen = [[False] * len(parents) for _ in parents]
    for node in range(len(parents)):
        at = node
        while at >= 0:
            seen[node][at] = True
            at = parents[at]
    return seen


def tree_of(*parents):
    rows = torch.tensor(parents)
    return DraftTree(torch.zeros_like(rows), rows)


@st.composite
def parent_rows(draw):
    num_nodes = draw(st.integers(1, 20))
    row = st.tuples(*(st.integers(0, node - 1) for node in range(1, num_nodes)))
    return [[-1, *drawn] for drawn in draw(st.lists(row, min_size=1, max_size=3))]


@given(parent_rows())
def test_the_mask_of_any_parents_is_their_closure_and_depths_count_the_links(rows):
    tree = tree_of(*rows)
    assert tree.ancestor_mask().tolist() == [closure(row) for row in rows]
    assert tree.depths().tolist() == [[sum(seen) - 1 for seen in closure(row)] for row in rows]
    assert tree.num_nodes == len(rows[0])


def test_a_chain_of_any_length_reaches_from_its_end_to_the_root():
    """A closure that stops one doubling early sees all of a short tree and loses the root of a long one."""
    for num_nodes in range(1, 70):
        tree = tree_of(range(-1, num_nodes - 1))
        assert tree.ancestor_mask()[0, -1].all(), num_nodes
        assert tree.depths()[0].tolist() == list(range(num_nodes))


def test_a_chain_says_the_same_as_the_tree_with_its_parents():
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    chain = DraftTree.chain(ids)
    same = DraftTree(ids, chain.parents)
    assert chain.is_chain and not same.is_chain
    assert chain.token_ids is ids and chain.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert torch.equal(chain.ancestor_mask(), same.ancestor_mask())
    assert torch.equal(chain.depths(), same.depths())
    assert chain.depths().dtype == same.depths().dtype == torch.int64

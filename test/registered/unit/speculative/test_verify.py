"""One verification: the rows of the target's forward, and where what was accepted ends up."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.layers.attention.torch_native_backend import HeadMajorLayout
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.accept import Accepted
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.verify import keep_accepted, share_tree, verify_batch
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.test_utils import published_topology

#: Two requests: 3 tokens in row 1 of the table, 5 in row 0; slots are numbered by 100 * row + position.
LENGTHS, ROWS = [3, 5], [1, 0]
#: Node 0 is the root; 1, 2 follow it, 3 follows 1, 4 follows 2.
PARENTS = [-1, 0, 0, 1, 2]


def round_of(step: DpStep | None = None) -> Round:
    table = 100 * torch.arange(2)[:, None] + torch.arange(20)
    state = SamplingState(SamplingParams(temperature=0.0), 0, ())
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.tensor([50, 60]),
        positions=torch.tensor(LENGTHS),
        out_cache_loc=torch.tensor([103, 5]),
        req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor(LENGTHS) + 1,
        seq_lens_list=[length + 1 for length in LENGTHS],
        extend_lens=[1, 1],
        sampling_states=[state, state],
        dp_step=step,
    )
    return Round.of(batch, table)


def tree() -> DraftTree:
    return DraftTree(torch.tensor([[50, 51, 52, 53, 54], [60, 61, 62, 63, 64]]), torch.tensor([PARENTS] * 2))


def pool() -> PagedKVPool:
    """A pool in which every slot holds its own number."""
    made = PagedKVPool(200, 1, HeadMajorLayout(), KVSpec(2, 1, 2, torch.float32))
    for layer in map(made.layer, range(2)):
        assert isinstance(layer, torch.Tensor)
        layer.copy_(torch.arange(201.0)[:, None].expand(2, 201, 2))
    return made


def numbers(made: PagedKVPool, slots: list[int]) -> list[float]:
    layer = made.layer(1)
    assert isinstance(layer, torch.Tensor)
    return layer[1, slots, 1].tolist()


def test_nodes_lie_in_slots_in_order_and_stand_at_their_depth() -> None:
    batch = verify_batch(round_of(), tree(), capture_hidden=True)
    assert batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.capture_hidden
    assert batch.out_cache_loc.tolist() == [103, 104, 105, 106, 107, 5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 4, 5, 5, 5, 6, 6, 7, 7]
    assert batch.seq_lens_list == batch.seq_lens.tolist() == [8, 10] and batch.extend_lens == [5, 5]
    assert batch.spec is not None and batch.spec.tail_mask is not None
    assert batch.spec.tail_mask[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert batch.num_logit_rows == 10


def test_a_chain_is_causal_without_a_mask() -> None:
    batch = verify_batch(
        round_of(), DraftTree.chain(torch.ones(2, 3, dtype=torch.int64)), capture_hidden=False
    )
    assert batch.spec is not None and batch.spec.tail_mask is None
    assert batch.positions.tolist() == [3, 4, 5, 5, 6, 7]


def test_replicas_are_told_rows_from_request_counts() -> None:
    """Request counts are exchanged; a phase with several rows each multiplies them."""
    step = DpStep([2, 1], [2, 1], is_extend=False, num_requests=[2, 1], slots_per_request=5)
    batch = verify_batch(round_of(step), tree(), capture_hidden=False)
    assert batch.dp_step is not None
    assert (batch.dp_step.num_tokens, batch.dp_step.num_logit_rows) == ([10, 5], [10, 5])


def test_an_accepted_path_moves_to_the_front_with_its_hidden_rows() -> None:
    """Request 0 keeps the path 0-2-4 of scattered nodes, request 1 its root alone."""
    made, hidden = pool(), torch.arange(10.0)[:, None]
    accepted = [Accepted([0, 2, 4], [52, 54, 7]), Accepted([0], [8])]
    verified = keep_accepted(round_of(), tree(), accepted, made, hidden)
    assert numbers(made, [103, 104, 105]) == [103, 105, 107]
    assert numbers(made, [5, 6, 7]) == [5, 6, 7]
    assert verified.node_ids.tolist() == [[50, 52, 54, 50, 50], [60, 60, 60, 60, 60]]
    assert verified.next_ids.tolist() == [[52, 54, 7, 0, 0], [8, 0, 0, 0, 0]]
    assert verified.counts == [3, 1] and verified.last_places().tolist() == [2, 0]
    assert verified.hidden is not None
    assert verified.hidden[:, 0].tolist() == [0, 2, 4, 0, 0, 5, 5, 5, 5, 5]


def test_all_sources_are_read_before_a_slot_is_written() -> None:
    """On the path 0-1-3-4 node 3 goes where node 2 was, and node 4 where node 3 was."""
    made = pool()
    late = DraftTree(tree().token_ids, torch.tensor([[-1, 0, 0, 1, 3]] * 2))
    path = Accepted([0, 1, 3, 4], [51, 53, 54, 9])
    keep_accepted(round_of(), late, [path, path], made, None)
    assert numbers(made, [103, 104, 105, 106]) == [103, 104, 106, 107]


def test_a_request_that_failed_at_its_root_keeps_one_row_of_no_meaning() -> None:
    failed = [Accepted([], [], "not finite"), Accepted([0, 1], [61, 3])]
    verified = keep_accepted(round_of(), tree(), failed, pool(), None)
    assert verified.counts == [1, 2] and verified.last_places().tolist() == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_verify_the_tree_of_their_leader(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may have drafted something else; a chain stays a chain."""
    leaders = torch.stack((tree().token_ids, tree().parents))
    group = FakeGroup(2, rank)
    monkeypatch.setattr(
        group, "broadcast", lambda tensor, src: tensor if rank == src else leaders, raising=False
    )
    mine = tree() if rank == 0 else DraftTree(tree().token_ids + 1, tree().parents)
    with (
        published_topology(tp_size=2, ranks={"world_rank": rank}),
        get_parallel().override(attn_tp_group=group),
    ):
        shared = share_tree(mine)
    assert shared.token_ids.equal(tree().token_ids) and shared.parents.equal(tree().parents)

"""What the attention-DP replicas of a tensor group agree on before rows move: sizes, head calls, refusals."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.distributed import communication_op
from sglang.srt.layers import communicator, dp_attention
from sglang.srt.layers.exchange.dp_gather import dp_gather, dp_scatter
from sglang.srt.layers.exchange.dp_padding import DpPaddingMode
from sglang.srt.layers.logits_processor import Piece, shared_pieces
from sglang.srt.runtime_context import get_forward, get_parallel
from sglang.test.test_utils import published_topology

CPU = torch.device("cpu")


@contextmanager
def replica(rank: int, tp_size: int = 4, replicas: int = 2, **fields: bool) -> Iterator[None]:
    layout = {"tp_size": tp_size, "dp_size": replicas, "enable_dp_attention": True}
    with published_topology(**layout, **fields, ranks={"world_rank": rank}):
        yield


@pytest.mark.parametrize(
    "counts, mode, total, own",
    [
        ([3, 5], DpPaddingMode.MAX_LEN, 12, 6),
        ([3, 5], DpPaddingMode.SUM_LEN, 8, 5),
        ([1, 0], DpPaddingMode.MAX_LEN, 4, 2),
        ([1, 0], DpPaddingMode.SUM_LEN, 1, 0),
        ([4, 4], DpPaddingMode.MAX_LEN, 8, 4),
        ([0, 0], DpPaddingMode.MAX_LEN, 0, 0),
    ],
)
def test_padded_rows_are_a_multiple_of_the_attention_width(
    counts: list[int], mode: DpPaddingMode, total: int, own: int
) -> None:
    with replica(rank=3):
        dp_attention.size_dp_forward(counts, mode)
        assert dp_attention.get_global_dp_buffer_len() == total
        assert dp_attention.get_local_dp_buffer_len() == own
        assert dp_attention.is_dp_max_padding() is mode.is_max_len()
        assert dp_attention.get_dp_global_num_tokens() == counts


@pytest.mark.parametrize("is_extend, padded", [(True, False), (False, True)])
def test_a_forward_is_sized_from_the_step_that_was_agreed(is_extend: bool, padded: bool) -> None:
    with replica(rank=1):
        dp_attention.prepare_dp_forward(ForwardBatch.idle(DpStep([0, 3], [0, 1], is_extend), CPU))
        assert get_forward().dp_max_padding is padded
        assert dp_attention.get_is_extend_in_batch() is is_extend


@pytest.mark.parametrize(
    "step, sentence",
    [
        (None, "needs the step"),
        (DpStep([1, 3], [0, 1], False), r"batch of 0 tokens.*agreed on tokens \[1, 3\]"),
        (DpStep([0, 3], [2, 1], False), r"0 rows to score.*rows \[2, 1\]"),
        (DpStep([0, 3, 0], [0, 1, 0], False), "replica 0 of 2"),
    ],
)
def test_a_batch_that_was_not_announced_is_refused(step: DpStep | None, sentence: str) -> None:
    batch = ForwardBatch.idle(DpStep([], [], False), CPU)
    batch.dp_step = step
    with replica(rank=0), pytest.raises(RuntimeError, match=sentence):
        dp_attention.prepare_dp_forward(batch)


def test_rows_of_another_number_than_sized_are_refused_before_anything_is_sent() -> None:
    with replica(rank=0):
        for mode in DpPaddingMode:
            dp_attention.size_dp_forward([2, 2], mode)
            with pytest.raises(RuntimeError, match="got 3 rows where this forward was sized for 2"):
                dp_gather(torch.ones(3, 1))
            with pytest.raises(RuntimeError, match="got 5 rows where this forward was sized for 4"):
                dp_scatter(torch.ones(5, 1))


def pieces(num_rows: list[int], rows_at_once: int) -> list[list[Piece]]:
    return [list(shared_pieces(num_rows, r, rows_at_once)) for r in range(len(num_rows))]


def test_all_replicas_call_a_shared_head_equally_often() -> None:
    first, second, third = pieces([5, 0, 2], 6)
    counts = [[2, 0, 2], [2, 0, 0], [1, 0, 0]]
    assert [piece.counts for piece in first] == counts
    assert [piece.counts for piece in second] == [piece.counts for piece in third] == counts
    assert [(piece.start, piece.end) for piece in first] == [(0, 2), (2, 4), (4, 5)]
    assert [(piece.start, piece.end) for piece in second] == [(0, 0)] * 3
    assert [(piece.start, piece.end) for piece in third] == [(0, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("num_rows", [[0, 0], [1, 0], [7, 3], [4, 4, 9, 0]])
@pytest.mark.parametrize("rows_at_once", [1, 3, 8, 100])
def test_pieces_cover_every_row_once_and_stay_within_the_bound(
    num_rows: list[int], rows_at_once: int
) -> None:
    found = pieces(num_rows, rows_at_once)
    for own, rows in zip(found, num_rows, strict=True):
        assert [row for piece in own for row in range(piece.start, piece.end)] == list(range(rows))
    for piece in found[0]:
        assert piece.counts is not None
        assert 0 < sum(piece.counts) <= max(rows_at_once, len(num_rows))


@pytest.mark.parametrize(
    "own_head, axis, spans", [(False, "tp", True), (True, "attn_tp", False)], ids=["shared", "own"]
)
def test_the_head_is_cut_over_the_group_that_the_flag_says(own_head: bool, axis: str, spans: bool) -> None:
    with replica(rank=0, enable_dp_lm_head=own_head):
        assert (communicator.head_axis(), communicator.head_spans_replicas()) == (axis, spans)
        # A draft that owns its attention is one replica wide, whatever the deployment is.
        with get_parallel().override(tp_size=2, attn_tp_size=2, attn_dp_size=1, moe_tp_size=2):
            assert (communicator.head_axis(), communicator.head_spans_replicas()) == ("tp", False)


def test_the_feed_forward_asks_the_scope_that_runs_and_not_the_deployment() -> None:
    rows = torch.ones(2, 1)
    with replica(rank=0, tp_size=2):
        dp_attention.size_dp_forward([1, 1], DpPaddingMode.SUM_LEN)
        with pytest.raises(RuntimeError, match="sized for 1"):
            communicator.gather_mlp_rows(rows)
        with get_parallel().override(tp_size=1, attn_dp_size=1, moe_tp_size=1, tp_rank=0):
            assert communicator.gather_mlp_rows(rows) is rows
            assert communicator.reduce_mlp_rows(rows) is rows
        group = Mock(world_size=2, rank_in_group=0, ranks=[0, 1])
        with get_parallel().override(attn_tp_size=2, attn_dp_size=1, tp_group=group):
            assert communicator.gather_mlp_rows(rows) is rows
            assert communicator.reduce_mlp_rows(rows) is group.all_reduce.return_value


def test_a_collective_over_one_rank_is_the_tensor_itself_and_asks_no_group() -> None:
    rows = torch.ones(2, 1)
    with published_topology(ranks={"world_rank": 0}):
        for name in communication_op.__all__:
            collective = getattr(communication_op, name)
            assert (collective(rows, [2]) if name.endswith("v") else collective(rows)) is rows, name

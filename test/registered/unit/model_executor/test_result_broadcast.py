"""The leader's result on its peers: exactly what it drew, and only for the plan it was drawn for."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.messages.io_struct import TokenLogprob
from sglang.srt.model_executor.result_broadcast import plan_checksum, plan_fingerprint, share_result
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.runtime_context import get_parallel
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.test_utils import published_topology

RESULT = GenerationBatchResult(
    next_token_ids=[[7], [], [2**31, 5]],
    failures=[None, "the model gave logits that are not finite: «NaN»", None],
    output_logprobs=[
        [TokenLogprob(-0.1234567890123456, 7, top=[(-0.5, 3), (-9999.0, 4)], chosen=[(-1e-300, 5)])],
        [],
        [],
    ],
    input_logprobs=[None, [TokenLogprob(None, 1), TokenLogprob(-1 / 3, 2)], []],
)


def batch(**changes: Any) -> ForwardBatch:
    fields: dict[str, Any] = {
        "input_ids": torch.tensor([5, 6, 7]),
        "positions": torch.tensor([0, 1, 9]),
        "out_cache_loc": torch.tensor([1, 2, 30]),
        "req_pool_indices": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([2, 10]),
        "seq_lens_list": [2, 10],
        "extend_lens": [2, 1],
        "sampling_states": [None, None],
    }
    return ForwardBatch(ForwardMode.EXTEND, **{**fields, **changes})


def share(rank: int, mine: ForwardBatch, draw: Any, heard: list[Any] = []) -> tuple[Any, FakeGroup]:  # noqa: B006
    group = FakeGroup(2, rank, heard=heard)
    with (
        published_topology(tp_size=2, ranks={"world_rank": rank}),
        get_parallel().override(attn_tp_group=group),
    ):
        return share_result(mine, draw), group


def never() -> GenerationBatchResult:
    raise AssertionError("a peer drew")


def test_a_peer_gets_exactly_what_the_leader_drew() -> None:
    """Floats to the last bit, None, sentences and tuples: penalties, seeds and stops follow from them."""
    drawn, group = share(0, batch(), lambda: RESULT)
    heard, _ = share(1, batch(), never, group.said)
    assert drawn is RESULT and heard == RESULT
    (entry,) = heard.output_logprobs[0]
    assert isinstance(entry, TokenLogprob) and isinstance(entry.top[0], tuple)


def test_a_result_without_logprobs_stays_without() -> None:
    plain = GenerationBatchResult([[1], [2]], [None, None])
    _, group = share(0, batch(), lambda: plain)
    assert share(1, batch(), never, group.said)[0] == plain


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input_ids": torch.tensor([5, 6, 8])}, "input_ids"),
        ({"positions": torch.tensor([0, 1, 8])}, "positions"),
        ({"out_cache_loc": torch.tensor([1, 2, 31])}, "out_cache_loc"),
        ({"req_pool_indices": torch.tensor([1, 0])}, "req_pool_indices"),
        ({"seq_lens": torch.tensor([2, 11])}, "seq_lens"),
        ({"seq_lens_list": [12]}, "batch size"),
        ({"sampling_states": [None, object()]}, "num_logit_rows"),
    ],
)
def test_any_difference_of_the_plans_shows_in_the_fingerprint(changes: dict[str, Any], named: str) -> None:
    here, there = plan_fingerprint(batch()), plan_fingerprint(batch(**changes))
    assert [name for name in here if here[name] != there[name]] == [named]
    assert plan_checksum(batch()) != plan_checksum(batch(**changes))
    _, group = share(0, batch(), lambda: RESULT)
    with pytest.raises(RuntimeError, match=f"rank 1 .* another batch than its leader: .*{named}"):
        share(1, batch(**changes), never, group.said)


def test_one_rank_draws_and_tells_nobody() -> None:
    group = FakeGroup(1)
    with published_topology(ranks={"world_rank": 0}), get_parallel().override(attn_tp_group=group):
        assert share_result(batch(), lambda: RESULT) is RESULT
    assert not group.calls


def test_an_idle_step_runs_the_model_and_draws_nothing() -> None:
    """Without its forward the other replicas would wait for ever in the first collective."""
    ran: list[ForwardBatch] = []
    worker = TpModelWorker.__new__(TpModelWorker)
    worker.model_runner = SimpleNamespace(forward=ran.append)
    idle = ForwardBatch.idle(DpStep([3, 0], [1, 0], True), torch.device("cpu"))
    assert worker.forward_batch_generation(idle) == GenerationBatchResult([], [])
    assert ran == [idle]
    idle.dp_step = None
    assert worker.forward_batch_generation(idle) == GenerationBatchResult([], []) and len(ran) == 1

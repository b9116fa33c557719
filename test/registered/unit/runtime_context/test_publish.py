"""Publish: checked whole, then replacing everything; roles, spawn ranks, provenance, reset."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.arg_groups.overrides import declare
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import (
    SpawnRanks,
    assert_published,
    get_context,
    get_exec,
    get_flags,
    get_parallel,
    get_schedule,
    get_server_args,
    get_spec,
    max_speculative_num_draft_tokens,
    publish,
    publish_role,
    reset_context,
)
from sglang.srt.server_args import ServerArgs


def _record(**fields: Any) -> Any:
    return ServerArgs(model_path="dummy", **fields)


EXAMPLE = {
    "tp_size": 8, "pp_size": 2, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2,
    "ep_size": 4, "moe_dp_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "world_rank, seat",
    [
        # pp tp | attention dp cp tp | experts dp ep tp
        (0, (0, 0, 0, 0, 0, 0, 0, 0)),
        (3, (0, 3, 0, 1, 1, 0, 3, 0)),
        (5, (0, 5, 1, 0, 1, 1, 1, 0)),
        (15, (1, 7, 1, 1, 1, 1, 3, 0)),
    ],
)
def test_a_world_rank_fixes_every_seat_of_the_worked_example(world_rank: int, seat: tuple[int, ...]) -> None:
    publish(_record(**EXAMPLE), role="test", ranks=SpawnRanks(world_rank=world_rank))
    names = ("pp", "tp", "attn_dp", "attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp")
    assert tuple(getattr(get_parallel(), f"{name}_rank") for name in names) == seat


@pytest.mark.parametrize("tp_rank, experts", [(0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (3, (1, 1))])
def test_experts_are_strided_and_their_tensor_slices_are_neighbours(
    tp_rank: int, experts: tuple[int, int]
) -> None:
    publish(_record(tp_size=4, ep_size=2), role="test", ranks=SpawnRanks(world_rank=tp_rank))
    assert (get_parallel().moe_ep_rank, get_parallel().moe_tp_rank) == experts


def test_cache_stripes_count_inside_the_attention_tensor_group() -> None:
    fields = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True, "dcp_size": 2}
    seen = []
    for world_rank in range(8):
        publish(_record(**fields), role="test", ranks=SpawnRanks(world_rank=world_rank))
        seen.append(get_parallel().dcp_rank)
    assert seen == [0, 1] * 4


def test_every_rank_is_stamped_so_that_no_group_is_needed() -> None:
    publish(_record(**EXAMPLE), role="test", ranks=SpawnRanks(world_rank=1, dp_rank=1, gpu_id=3))
    parallel = get_parallel()
    assert (parallel.launch_world_rank, parallel.dp_rank, parallel.gpu_id) == (1, 1, 3)
    kinds = ("tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "attn_dp", "launch_world")
    assert {parallel.answered_by(f"{kind}_rank") for kind in kinds} == {"stamp"}


def test_a_joiner_is_counted_from_its_offset() -> None:
    record = _record(tp_size=4, ep_join_rank_offset=8)
    publish(record, role="test", ranks=SpawnRanks(world_rank=10))
    assert (get_parallel().launch_world_rank, get_parallel().tp_rank) == (10, 2)
    with pytest.raises(ValueError, match=r"7 - 8 and 4 \* 1"):
        publish(record, role="test", ranks=SpawnRanks(world_rank=7))


@pytest.mark.parametrize("bad", [{"world_rank": -1}, {"world_rank": True}, {"dp_rank": -1}, {"gpu_id": "0"}])
def test_a_spawn_rank_is_a_number_from_zero_up(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SpawnRanks(**bad)


@pytest.mark.parametrize(
    "fields, ranks, words",
    [
        ({"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}, None, "set by publish"),
        ({"tp_size": 4, "ep_size": 3}, None, r"4 != 3 \* 1 \* 1"),
        ({"tp_size": 2, "dp_size": 4, "enable_dp_attention": True}, SpawnRanks(0), r"2 != 0 \* 4 \* 1"),
        ({"tp_size": 0}, None, "tp_size >= 1: got 0"),
        ({"ep_size": -2, "attn_cp_size": 0}, None, r"ep_size >= 1: got -2\n  - attn_cp_size >= 1: got 0"),
        ({"tp_size": 2}, SpawnRanks(world_rank=2), r"world_rank 2 is outside the deployment"),
        (
            {"speculative_adaptive": True, "speculative_adaptive_config": "no/such/file"},
            None,
            "cannot be read",
        ),
    ],
)
def test_a_refused_publish_replaces_nothing(
    fields: dict[str, Any], ranks: SpawnRanks | None, words: str
) -> None:
    first = _record(tp_size=4)
    publish(first, role="scheduler", ranks=SpawnRanks(world_rank=3))
    get_context().override("a test", page_size=16)
    flags, stamp = get_flags().snapshot(), dict(get_parallel()._stamp)
    with pytest.raises(ValueError, match=words):
        publish(_record(**fields), role="tokenizer", ranks=ranks)
    assert get_server_args() is first
    assert (publish_role(), get_parallel().tp_size, get_parallel().tp_rank) == ("scheduler", 4, 3)
    assert get_schedule().page_size == 16 and len(get_context().overrides_log()) == 1
    assert (get_flags().snapshot(), get_parallel()._stamp) == (flags, stamp)


def test_publishing_while_groups_of_other_widths_stand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is not at fault (hence RuntimeError), and live ranks off those groups must not be blamed
    on it."""
    first = _record(tp_size=2)
    publish(first, role="test")
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=2, rank_in_group=1))
    with pytest.raises(RuntimeError, match=r"destroy_model_parallel.*\n.*built 2, configured 1"):
        publish(_record(), role="test")
    assert get_server_args() is first
    publish(_record(tp_size=2), role="test")  # the same widths may be published again


def test_replicas_of_the_whole_model_are_not_attention_data_parallelism() -> None:
    publish(_record(tp_size=2, dp_size=2), role="test")
    assert (get_parallel().dp_size, get_parallel().attn_dp_size, get_parallel().attn_tp_size) == (2, 1, 2)
    assert not get_flags().dp.enabled


def test_publishing_again_replaces_role_bags_log_stamps_and_flags() -> None:
    publish(
        _record(tp_size=2, dp_size=2, enable_dp_attention=True, enable_torch_compile=True),
        role="scheduler",
        ranks=SpawnRanks(world_rank=1, dp_rank=1),
    )
    get_context().override("a test", page_size=16)
    get_parallel().override_permanently(nccl_port=1234)
    flags = get_flags()
    assert flags.dp.enabled and flags.capture.enable_torch_compile
    publish(_record(page_size=2), role="engine")
    assert (publish_role(), get_schedule().page_size, get_parallel().nccl_port) == ("engine", 2, None)
    assert get_context().overrides_log() == ()
    with pytest.raises(RuntimeError, match="rank bundle"):
        _ = get_parallel().dp_rank
    assert get_flags() is flags and not flags.dp.enabled and not flags.capture.enable_torch_compile


@pytest.mark.parametrize("role", ["scheduler", "tokenizer", "detokenizer", "controller", "engine", "test"])
def test_a_role_is_remembered_and_restricts_no_read(role: str) -> None:
    record = _record()
    publish(record, role=role)
    assert publish_role() == role
    assert_published(record, role=role)
    assert get_exec().kernel.attention_backend is None and get_parallel().tp_size == 1


@pytest.mark.parametrize("role", ["", "Scheduler", "worker", None])
def test_a_role_comes_from_a_closed_set(role: Any) -> None:
    with pytest.raises(ValueError, match="a role is one of"):
        publish(_record(), role=role)
    assert get_context()._server_args is None


def test_assert_published_tells_its_three_failures_apart_and_names_the_cure() -> None:
    record = _record()
    with pytest.raises(RuntimeError, match=r"nothing is published in this process; .*publish\("):
        assert_published(record, role="test")
    publish(record, role="tokenizer")
    with pytest.raises(RuntimeError, match="a different record is published"):
        assert_published(_record(), role="tokenizer")  # equal field by field is not the same
    with pytest.raises(RuntimeError, match="published under role 'tokenizer', not 'scheduler'"):
        assert_published(record, role="scheduler")
    assert_published(record, role="tokenizer")


def test_a_declared_result_is_published_and_the_record_keeps_what_was_said() -> None:
    record = _record(page_size=4)
    declare(record, "a hook", page_size=32, tp_size=2)
    publish(record, role="test")
    assert (get_schedule().page_size, record.page_size) == (32, 4)
    assert (get_parallel().tp_size, get_parallel().attn_tp_size, record.tp_size) == (2, 2, 1)


def test_publish_opens_no_model_path_and_resolves_nothing() -> None:
    record = ServerArgs(model_path="/no/such/model", dtype="auto")
    publish(record, role="test")
    from sglang.srt.runtime_context import get_model

    assert (get_model().model_path, get_model().dtype) == ("/no/such/model", "auto")


@dataclasses.dataclass
class _Partial:
    tp_size: int = 4
    pp_size: int = 2
    page_size: int | None = 8


def test_any_object_may_be_published_for_what_it_has() -> None:
    partial = _Partial()
    publish(partial, role="test", ranks=SpawnRanks(world_rank=6))
    parallel = get_parallel()
    assert get_server_args() is partial
    assert (parallel.tp_size, parallel.tp_rank, parallel.pp_rank, get_schedule().page_size) == (4, 2, 1, 8)
    with pytest.raises(RuntimeError, match="not available"):
        _ = parallel.attn_tp_size  # its inputs are missing, so it is not invented
    with pytest.raises(AttributeError, match="the published record does not carry it"):
        _ = get_schedule().schedule_policy
    assert not get_flags().dp.enabled and max_speculative_num_draft_tokens() is None
    get_context().set_server_args(bare := object())
    assert get_server_args() is bare and publish_role() is None


@pytest.mark.parametrize("steps, tokens, bound", [([2], 3, 3), ([4], 3, 5), ([1, 6], 3, 7), ([3], 9, 9)])
def test_the_draft_bound_is_read_at_each_publish(
    tmp_path: Path, steps: list[int], tokens: int, bound: int
) -> None:
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": steps}}))
    record = _record(
        speculative_num_draft_tokens=tokens,
        speculative_adaptive=True,
        speculative_adaptive_config=str(config),
    )
    publish(record, role="test")
    assert max_speculative_num_draft_tokens() == bound
    config.write_text(json.dumps({"1": {"candidate_steps": [10]}}))
    assert max_speculative_num_draft_tokens() == bound
    publish(record, role="test")
    assert max_speculative_num_draft_tokens() == 11
    reset_context()
    with pytest.raises(ValueError, match="'spec' not published"):
        max_speculative_num_draft_tokens()


def test_the_draft_bound_follows_a_later_override_upwards_only() -> None:
    """Buffers are sized by it: what was published may still be in flight, and what is in force must fit."""
    publish(_record(speculative_num_draft_tokens=4), role="test")
    get_context().override("a test", speculative_num_draft_tokens=9)
    assert max_speculative_num_draft_tokens() == 9
    get_context().override("a test", speculative_num_draft_tokens=2)
    assert max_speculative_num_draft_tokens() == 4
    get_context().override("a test", speculative_num_draft_tokens=None)
    assert max_speculative_num_draft_tokens() == 4
    publish(_record(), role="test")
    assert max_speculative_num_draft_tokens() is None
    with get_spec().override(speculative_num_draft_tokens=3):
        assert max_speculative_num_draft_tokens() == 3


def test_the_context_loads_neither_torch_nor_utils() -> None:
    """The server process publishes too, and the door opens in the time that importing torch would take."""
    code = (
        "import sys; from sglang.srt.runtime_context import *; "
        "from sglang.srt.server_args import ServerArgs; "
        "publish(ServerArgs(model_path='x', tp_size=2), role='tokenizer'); "
        "get_parallel().override(tp_size=1, attn_tp_size=1, moe_tp_size=1).__enter__(); "
        "print([m for m in sys.modules if m == 'torch' or m.startswith('sglang.srt.utils')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr

"""What tests publish for a block: `override_server_args` and `published_topology` put everything back."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from typing import Any

import pytest

from sglang.srt.arg_groups.overrides import declared_provenance, resolution_result
from sglang.srt.runtime_context import (
    SpawnRanks,
    get_context,
    get_flags,
    get_model,
    get_parallel,
    get_schedule,
    get_server_args,
    publish,
    publish_role,
    reset_context,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.test_utils import published_topology


def _state() -> dict[str, Any]:
    """Everything a scoped publication must put back."""
    context = get_context()
    published = context.publication is not None
    return {
        "record": context._server_args,
        "role": publish_role(),
        "leaves": dict(get_parallel()._config or {}),
        "page_size": get_schedule().page_size if published else None,
        "stamp": dict(get_parallel()._stamp),
        "log": context.overrides_log(),
        "bound": context.publication.draft_bound if context.publication else None,
        "flags": get_flags().snapshot(),
    }


def _a_busy_process() -> Any:
    record = ServerArgs(
        model_path="dummy", tp_size=4, dp_size=2, enable_dp_attention=True, speculative_num_draft_tokens=5
    )
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=3, dp_rank=1))
    get_context().override("somebody", page_size=16)
    get_parallel().override_permanently(nccl_port=99)
    get_flags().moe.tbo_enabled = True
    return record


def test_an_override_declares_beside_a_dummy_record() -> None:
    with get_context().override_server_args(tp_size=8, page_size=32) as record:
        assert get_server_args() is record and (record.tp_size, record.page_size) == (1, None)
        assert resolution_result(record, "page_size") == get_schedule().page_size == 32
        assert (get_parallel().tp_size, get_parallel().attn_tp_size, get_parallel().moe_tp_size) == (8, 8, 8)
        assert get_model().model_path == "dummy"
        assert {line.source for line in declared_provenance(record)} == {"override_server_args"}
    assert get_context()._server_args is None


def test_an_override_puts_a_busy_process_back() -> None:
    _a_busy_process()
    before = _state()
    with get_context().override_server_args(tp_size=2, page_size=1, enable_torch_compile=True):
        get_context().override("inside", page_size=2)
        get_parallel().override_permanently(nccl_port=1)
        assert not get_flags().dp.enabled and get_flags().capture.enable_torch_compile
        with pytest.raises(RuntimeError, match="rank bundle"):
            _ = get_parallel().dp_rank  # it has no ranks
    assert _state() == before
    assert get_parallel().tp_rank == 3


def test_the_restored_log_and_stamp_do_not_share_what_grew_inside() -> None:
    _a_busy_process()
    override = get_context().override_server_args()
    override.install()
    override.restore()
    get_context().override("afterwards", max_prefill_tokens=7)
    assert [line.source for line in get_context().overrides_log()] == ["somebody", "afterwards"]


def test_an_override_nests_and_works_after_a_reset() -> None:
    record = _a_busy_process()
    outer = get_context().override_server_args(tp_size=2)
    outer.install()
    with get_context().override_server_args(tp_size=4):
        assert get_parallel().tp_size == 4
    assert get_parallel().tp_size == 2
    reset_context()
    outer.restore()
    assert get_server_args() is record and get_flags().dp.enabled
    outer.restore()  # nothing is installed: nothing happens
    assert get_server_args() is record


def test_an_override_is_installed_once_and_refuses_before_it_writes() -> None:
    override = get_context().override_server_args(page_size=1)
    override.install()
    with pytest.raises(AssertionError, match="installed already"):
        override.install()
    override.restore()
    override.install()  # after a restore it may be used again
    override.restore()
    for fields, words in (({"pagesize": 1}, "nearest: page_size"), ({"tp_size": 4, "ep_size": 3}, "4 != 3")):
        with pytest.raises(ValueError, match=words), get_context().override_server_args(**fields):
            pass
        assert get_context()._server_args is None


def test_an_underscore_name_is_declared_if_it_is_a_field_and_seeded_if_not() -> None:
    field = "_speculative_draft_quantization_explicitly_set"
    with get_context().override_server_args(**{field: True, "_a_cache": 3}) as record:
        assert getattr(record, field) is None and resolution_result(record, field) is True
        assert record._a_cache == 3
        with pytest.raises(AttributeError):
            record.tp_size = 2


def test_a_topology_is_what_a_spawned_rank_would_publish() -> None:
    with published_topology(
        tp_size=4, dp_size=2, enable_dp_attention=True, ranks={"world_rank": 2, "dp_rank": 1}
    ) as record:
        parallel = get_parallel()
        assert get_server_args() is record and (record.tp_size, record.dp_size) == (4, 2)
        assert (parallel.attn_tp_size, parallel.attn_dp_rank, parallel.attn_tp_rank) == (2, 1, 0)
        assert (parallel.dp_rank, publish_role(), get_flags().dp.enabled) == (1, "test", True)
    with published_topology(ranks={"dp_rank": 0}):
        assert (get_parallel().launch_world_rank, get_parallel().dp_rank) == (0, 0)
    with published_topology(tp_size=2):
        with pytest.raises(RuntimeError, match="rank bundle"):
            _ = get_parallel().dp_rank
        with pytest.raises(RuntimeError, match="not built"):
            _ = get_parallel().tp_rank
    assert get_context()._server_args is None


@pytest.mark.parametrize("busy", [True, False])
def test_a_topology_restores_everything_also_after_an_exception(busy: bool) -> None:
    if busy:
        _a_busy_process()
    else:
        get_parallel().override_permanently(attn_dp_rank=1)  # a stamp without a publication
    before = _state()
    with pytest.raises(KeyError), published_topology(tp_size=2, ranks={"world_rank": 1}):
        get_context().override("inside", page_size=2)
        get_parallel().override_permanently(nccl_port=5)
        get_flags().moe.tbo_enabled = not get_flags().moe.tbo_enabled
        get_flags().dp.use_world_group_for_gather = True
        raise KeyError
    assert _state() == before


def test_a_refused_topology_changes_nothing() -> None:
    _a_busy_process()
    before = _state()
    for fields, words in (
        ({"attn_dp_size": 2}, "attn_dp_size"),
        ({"tp_size": 3, "ep_size": 2}, r"3 != 2 \* 1 \* 1"),
        ({"ranks": {"world_rank": 5}}, "outside the deployment"),
    ):
        with pytest.raises(ValueError, match=words), published_topology(**fields):
            pass
        assert _state() == before


def test_a_scope_left_open_inside_is_told_and_the_rest_is_restored() -> None:
    _a_busy_process()
    before = _state()
    scope = get_parallel().override(nccl_port=1)
    with pytest.raises(AssertionError, match="still open: nccl_port"), published_topology():
        scope.__enter__()
    scope.__exit__(None, None, None)
    assert _state() == before

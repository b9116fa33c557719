"""Runtime state: declared flags, the two kinds of forward flags, named handles, and that a reset ends them
all."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    Bag,
    _FlagGroupBase,
    get_context,
    get_exec,
    get_flags,
    get_forward,
    get_parallel,
    get_resources,
    get_schedule,
    publish,
    reset_context,
)
from sglang.srt.runtime_context.forward import _CONTEXT_LOCAL, _GRAPH_VISIBLE
from sglang.srt.server_args import ServerArgs


class _Base(_FlagGroupBase):
    alpha: int = 1


class _Derived(_Base):
    beta: str = "b"


def test_a_flag_group_takes_what_it_and_its_base_declare() -> None:
    group = _Derived()
    group.alpha, group.beta = 2, "c"
    assert group.values() == {"alpha": 2, "beta": "c"}
    assert _Derived().values() == {"alpha": 1, "beta": "b"}
    with pytest.raises(AttributeError, match="declares no 'alhpa'; nearest: alpha"):
        group.alhpa = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _Base().beta = "x"  # type: ignore[attr-defined]


def test_a_flag_scope_checks_all_names_first_and_restores_on_an_exception() -> None:
    group = _Derived()
    with pytest.raises(ValueError, match="'gamma'"), group.override(alpha=9, gamma=1):
        pass
    assert group.alpha == 1
    with pytest.raises(KeyError), group.override(alpha=9):
        assert group.alpha == 9
        raise KeyError
    assert group.alpha == 1


def test_flag_groups_are_not_replaced_one_by_one() -> None:
    for name in ("capture", "dp", "moe", "other"):
        with pytest.raises(AttributeError, match="write a leaf"):
            setattr(get_flags(), name, object())


def _in_thread(read: Any) -> Any:
    seen: list[Any] = []
    worker = threading.Thread(target=lambda: seen.append(read()))
    worker.start()
    worker.join()
    return seen[0]


@pytest.mark.parametrize("name", sorted({*_GRAPH_VISIBLE, *_CONTEXT_LOCAL}))
def test_a_forward_flag_is_scoped_set_and_dropped_by_a_reset(name: str) -> None:
    default = getattr(get_forward(), name)
    assert default in (None, False)
    with get_forward().scoped(**{name: 7}):
        assert getattr(get_forward(), name) == 7
        assert bool(_in_thread(lambda: getattr(get_forward(), name))) is (name in _GRAPH_VISIBLE)
    assert getattr(get_forward(), name) == default
    get_forward().set(name, 7)
    assert getattr(get_forward(), name)
    old = get_forward()
    reset_context()
    assert get_forward() is not old
    assert getattr(get_forward(), name) == default


def test_forward_flags_are_not_assigned_and_misspelt_names_write_nothing() -> None:
    forward = get_forward()
    for name in ("multi_stream", "is_extend_in_batch", "nope"):
        with pytest.raises(AttributeError, match="not assigned"):
            setattr(forward, name, True)
    with (
        pytest.raises(ValueError, match="'multi_streem'"),
        forward.scoped(is_extend_in_batch=True, multi_streem=1),
    ):
        pass
    with pytest.raises(ValueError, match="'nope'"):
        forward.set("nope", 1)
    assert not forward.is_extend_in_batch


def test_a_scope_of_both_kinds_restores_both_on_an_exception() -> None:
    with pytest.raises(KeyError), get_forward().scoped(multi_stream=True, fuse_mlp_allreduce=True):
        raise KeyError
    assert not get_forward().multi_stream and not get_forward().fuse_mlp_allreduce


def test_graph_visible_flags_trace_and_a_new_value_is_seen() -> None:
    compiled = torch.compile(
        lambda x: x + 1 if get_forward().mlp_reduce_scatter else x, fullgraph=True, backend="eager"
    )
    assert compiled(torch.zeros(1)).item() == 0
    with get_forward().scoped(mlp_reduce_scatter=True):
        assert compiled(torch.zeros(1)).item() == 1
    assert compiled(torch.zeros(1)).item() == 0


def test_streams_and_buffers_are_made_once_per_name() -> None:
    context, made = get_context(), []

    def make() -> object:
        made.append(object())
        return made[-1]

    with patch("torch.cuda.Stream", make):
        assert context.get_stream("a") is context.get_stream("a")
        assert context.get_stream("b") is not context.get_stream("a")
    assert context.get_buffer("a", make) is context.get_buffer("a", make)
    assert len(made) == 3
    context.set_stream("a", sentinel := object())
    assert context.get_stream("a") is sentinel


def test_a_reset_drops_every_handle() -> None:
    from sglang.srt.distributed.utils import get_global_tcp_store, set_global_tcp_store
    from sglang.srt.eplb.expert_distribution import (
        get_global_expert_distribution_recorder,
        set_global_expert_distribution_recorder,
    )
    from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool
    from sglang.srt.observability.trace import get_global_trace_level, set_global_trace_level

    set_global_tcp_store(object())
    set_global_trace_level(1)
    noop = get_global_expert_distribution_recorder()
    set_global_expert_distribution_recorder(object())
    get_resources().graph_memory_pool = object()
    get_resources().deepep.buffer = object()
    get_context().set_stream("a", object())
    get_context().get_buffer("a", object)
    reset_context()
    assert get_global_tcp_store() is None and get_global_graph_memory_pool() is None
    assert get_global_expert_distribution_recorder() is noop
    assert get_resources().deepep.buffer is None
    assert get_resources().streams == {} and get_resources().buffers == {}
    with envs.SGLANG_TRACE_LEVEL.override(2):
        assert get_global_trace_level() == 2
    assert get_global_trace_level() == 2, "asked once, kept until set or reset"
    with pytest.raises(ValueError, match="trace level"):
        set_global_trace_level(-1)


def test_two_resource_objects_share_no_dictionary() -> None:
    first = get_resources()
    first.streams["a"] = object()
    reset_context()
    assert get_resources() is not first and get_resources().streams == {}


# -- one of each in a process ------------------------------------------------------------------------------

#: How to reach each part of the context -> what an error tells to ask instead of a copy.
PARTS: dict[str, Callable[[], Any]] = {
    "get_context()": get_context,
    "get_schedule()": get_schedule,
    "get_exec().kernel": lambda: get_exec().kernel,
    "get_flags()": get_flags,
    "get_flags() ": lambda: get_flags().capture,
    "get_flags()  ": lambda: get_flags().dp,
    "get_flags()   ": lambda: get_flags().moe,
    "get_forward()": get_forward,
    "get_resources()": get_resources,
}


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("accessor", PARTS)
def test_a_part_of_the_context_is_not_copied_and_the_error_says_whom_to_ask(
    accessor: str, carry: Callable[[Any], Any]
) -> None:
    """An override of the copy was written into the original; a deep copy failed over a lock, or a slot."""
    publish(ServerArgs(model_path="dummy"), role="test")
    with pytest.raises(TypeError) as caught:
        carry(PARTS[accessor]())
    assert f"Ask {accessor.strip()} wherever" in str(caught.value)


def test_every_part_that_holds_scopes_is_among_those_that_refuse_a_copy() -> None:
    publish(ServerArgs(model_path="dummy"), role="test")
    tried = {type(reach()) for reach in PARTS.values()}
    context = get_context()
    parts = [*vars(context).values(), context.flags.dp, context.flags.moe, context.flags.capture]
    holders = {type(part) for part in parts if hasattr(part, "_scopes")} - {type(get_parallel())}
    assert holders <= tried and len(holders) == 5


def test_a_copy_that_is_let_through_writes_into_the_original() -> None:
    """The twin: with the refusal taken out, the bug is there."""
    publish(ServerArgs(model_path="dummy"), role="test")
    with patch.object(Bag, "__reduce__", object.__reduce__):
        twin = copy.copy(get_schedule())
        with twin.override(max_prefill_tokens=77):
            assert get_schedule().max_prefill_tokens == 77

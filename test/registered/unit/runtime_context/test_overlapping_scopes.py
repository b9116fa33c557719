"""Scopes of several threads and tasks: one order of closing, and nothing left behind in any other."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch

from sglang.srt.distributed.parallel_state import patch_pipeline_parallel_group, patch_tensor_parallel_group
from sglang.srt.layers import dp_attention
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.runtime_context import (
    ParallelContext,
    SpawnRanks,
    get_context,
    get_exec,
    get_flags,
    get_forward,
    get_parallel,
    get_schedule,
    publish,
)
from sglang.srt.runtime_context import context as context_module
from sglang.srt.runtime_context import parallel as parallel_module
from sglang.srt.runtime_context.scopes import Scope, ScopeStack, scope_function
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_utils import draft_tp_context


@pytest.fixture(autouse=True)
def published() -> None:
    publish(ServerArgs(model_path="dummy"), role="scheduler", ranks=SpawnRanks())


#: Each place of process-wide values that a scope states: how to state a number there, and how to read it.
PLACES: dict[str, tuple[Callable[[int], AbstractContextManager[None]], Callable[[], Any]]] = {
    "parallel": (lambda n: get_parallel().override(nccl_port=n), lambda: get_parallel().nccl_port),
    "bag": (lambda n: get_schedule().override(page_size=n), lambda: get_schedule().page_size),
    "flags": (lambda n: get_flags().dp.override(hidden_size=n), lambda: get_flags().dp.hidden_size),
    "forward": (
        lambda n: get_forward().scoped(dp_global_buffer_len=n),
        lambda: get_forward().dp_global_buffer_len,
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_scope_that_closes_out_of_order_is_an_error_and_leaves_nothing_behind(place: str) -> None:
    """Each used to put back what it had found, so that the first one's value stayed for ever."""
    state, read = PLACES[place]
    before, first, second = read(), state(1), state(2)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="last-in first-out"):
        first.__exit__(None, None, None)
    assert read() == 2, "the scope that is still open lost its value"
    second.__exit__(None, None, None)
    assert read() == before


def test_the_error_names_both_scopes_and_where_they_were_opened() -> None:
    first, second = get_parallel().override(nccl_port=1), get_parallel().override(node_rank=5, nnodes=9)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError) as caught:
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    words = str(caught.value)
    assert "states nccl_port (opened at " in words and "states nnodes, node_rank (opened at " in words
    assert words.count(__file__) == 2


def test_threads_that_overlap_are_told_and_the_process_is_as_before() -> None:
    parallel = get_parallel()
    inside, leave = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def hold() -> None:
        try:
            with parallel.override(nccl_port=1):
                inside.set()
                leave.wait(60)
        except RuntimeError as error:
            errors.append(error)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    with parallel.override(nccl_port=2, node_rank=3):
        leave.set()
        holder.join(60)
        assert (parallel.nccl_port, parallel.node_rank) == (2, 3)
    assert "last-in first-out" in str(errors[0])
    assert parallel._overrides == {} and parallel.nccl_port is None


def test_tasks_that_overlap_are_told_and_the_process_is_as_before() -> None:
    async def scene() -> list[BaseException | None]:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def early() -> None:
            with get_parallel().override(nccl_port=1):
                entered.set()
                await leave.wait()

        async def late() -> None:
            await entered.wait()
            with get_parallel().override(nccl_port=2):
                leave.set()
                await task

        task = asyncio.create_task(early())
        return await asyncio.gather(task, late(), return_exceptions=True)

    told = asyncio.run(scene())
    assert [type(error) for error in told] == [RuntimeError, RuntimeError]  # late() meets it where it waits
    assert get_parallel()._overrides == {}


def test_in_whatever_order_scopes_close_the_open_ones_answer_and_the_rest_is_taken_back() -> None:
    """Against a model worked out anew at each step: the values below, then each open scope in turn."""
    draw = random.Random(20)
    for _ in range(200):
        ground = dict.fromkeys(draw.sample("abcd", 2), 0)
        values = dict(ground)
        stack = ScopeStack("a test", values)
        open_now: list[Scope] = []
        for step in range(12):
            if open_now and draw.random() < 0.5:
                scope = draw.choice(open_now)
                in_order = scope is open_now[-1]
                open_now.remove(scope)
                if in_order:
                    scope.__exit__(None, None, None)
                else:
                    with pytest.raises(RuntimeError, match="a test: the scope that states"):
                        scope.__exit__(None, None, None)
            else:
                scope = Scope(stack, dict.fromkeys(draw.sample("abcd", draw.randint(1, 3)), step + 1))
                scope.__enter__()
                open_now.append(scope)
            expected = dict(ground)
            for scope in open_now:
                expected.update(scope.names)
            assert values == expected
        for scope in reversed(open_now):
            scope.__exit__(None, None, None)
        assert values == ground


def test_many_threads_that_nest_properly_in_turn_never_meet_a_wrong_order() -> None:
    parallel, turn = get_parallel(), threading.Lock()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(200):
                with turn, parallel.override(nccl_port=number), parallel.override(node_rank=number):
                    assert (parallel.nccl_port, parallel.node_rank) == (number, number)
        except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == [] and parallel._overrides == {}


@scope_function
def _block() -> Iterator[None]:
    with get_parallel().override(nccl_port=1):
        yield


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: get_parallel().override(nccl_port=1, node_rank=2), "() that states nccl_port, node_rank"),
        (lambda: get_schedule().override(page_size=2), "'schedule' that states page_size"),
        (lambda: get_flags().dp.override(enabled=True), "DpFlags that states enabled"),
        (lambda: get_forward().scoped(dp_max_padding=True), "ForwardFlags.scoped(...)"),
        (lambda: patch_tensor_parallel_group(object(), owns_attention=True), "tensor_scope(...)"),
        (lambda: patch_pipeline_parallel_group(object()), "patch_pipeline_parallel_group(...)"),
        (lambda: draft_tp_context(owns_attention=True), "tensor_scope(...)"),
        (lambda: draft_tp_context(owns_attention=False), "_target_placement(...)"),
        (_block, "_block(...)"),
    ],
)  # fmt: skip
def test_a_scope_that_is_made_and_never_entered_warns_once(make: Callable[[], Any], words: str) -> None:
    """`draft_tp_context(owns_attention=True)` on a line of its own leaves the draft in the target's place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        gc.collect()
    assert [item.category for item in caught] == [RuntimeWarning]
    assert words in str(caught[0].message) and "never entered" in str(caught[0].message)


def test_an_entered_scope_and_a_refused_one_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with get_parallel().override(nccl_port=1), get_schedule().override(page_size=2), _block():
            pass
        for refused in ({"tp_sise": 1}, {"tp_size": 2}):
            with pytest.raises(ValueError), get_parallel().override(**refused):  # type: ignore[arg-type]
                pass
        gc.collect()


def test_a_scope_is_entered_once() -> None:
    scope = get_parallel().override(nccl_port=1)
    with ExitStack() as stack:
        stack.enter_context(scope)
        with pytest.raises(RuntimeError, match=r"nccl_port .*was entered before; make another"):
            scope.__enter__()
    assert get_parallel()._overrides == {}


@pytest.mark.parametrize("place", PLACES)
def test_a_scope_that_is_not_open_cannot_be_closed_and_the_error_names_it(place: str) -> None:
    """It was an IndexError or a ValueError of the list inside; a block that nobody had entered stated its
    names for ever."""
    state, read = PLACES[place]
    before, closed, fresh = read(), state(1), state(2)
    name = {"parallel": "nccl_port", "bag": "page_size", "flags": "hidden_size", "forward": "scoped"}[place]
    with closed:
        assert read() == 1  # the twin: an open scope is closed without a word
    for scope in (closed, fresh):
        for others in (0, 1):
            with ExitStack() as stack:
                for _ in range(others):
                    stack.enter_context(state(3))
                held = read()
                with pytest.raises(RuntimeError, match=rf"{name}.* closes and is not open"):
                    scope.__exit__(None, None, None)
                assert read() == held
    with pytest.raises(RuntimeError, match=rf"{name}.* was entered before; make another"):
        closed.__enter__()
    assert read() == before
    with fresh:
        assert read() == 2


# -- what is refused while one is open ---------------------------------------------------------------------

#: Scopes over what a publication replaces, or seeds.
PUBLISHED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "dp_rank": lambda: get_parallel().override(dp_rank=None),
    "max_prefill_tokens": lambda: get_schedule().override(max_prefill_tokens=7),
    "sampling_backend": lambda: get_exec().kernel.override(sampling_backend="pytorch"),
    "enabled": lambda: get_flags().dp.override(enabled=True),
    "hidden_size": lambda: get_flags().dp.override(hidden_size=7),
    "enable_torch_compile": lambda: get_flags().capture.override(enable_torch_compile=True),
    "tbo_enabled": lambda: get_flags().moe.override(tbo_enabled=True),
}

PUBLISHING: dict[str, Callable[[], Any]] = {
    "publish": lambda: publish(ServerArgs(model_path="dummy", tp_size=2), role="test"),
    "set": lambda: get_context().set_server_args(ServerArgs(model_path="dummy", tp_size=2)),
    "install": lambda: get_context().override_server_args(tp_size=2).install(),
}


def _in_force() -> dict[str, Any]:
    return {
        "record": get_context().server_args,
        "bags": {name: bag.values() for name, bag in get_context().publication.bags.items()},
        "settled": dict(get_parallel().outside_scopes()),
        "flags": get_flags().snapshot(),
    }


@pytest.mark.parametrize("act", PUBLISHING)
@pytest.mark.parametrize("name", PUBLISHED)
def test_publishing_is_refused_inside_any_scope_over_what_it_replaces(name: str, act: str) -> None:
    """A scope that closed afterwards put a seeded flag back to what the old record said, for good; one of a
    namespace lost its value with the namespace."""
    before = _in_force()
    with PUBLISHED[name]():
        inside = _in_force()
        with pytest.raises(RuntimeError, match=rf"publish inside an open .*states {name}; close the scope"):
            PUBLISHING[act]()
        assert _in_force() == inside
    assert _in_force() == before
    PUBLISHING[act]()  # the twin: outside it goes through
    assert get_parallel().tp_size == 2


def test_forward_flags_may_be_stated_while_a_record_is_published() -> None:
    """A publication neither reads nor writes them, so there is nothing to refuse."""
    with get_forward().scoped(dp_max_padding=True, multi_stream=True):
        PUBLISHING["publish"]()
        assert get_forward().dp_max_padding and get_forward().multi_stream
    assert not get_forward().dp_max_padding


@pytest.mark.parametrize("flag", [{"enabled": True}, {"hidden_size": 7}])
def test_a_stamp_that_sets_a_flag_is_refused_inside_a_scope_of_these_flags(flag: dict[str, Any]) -> None:
    record = ServerArgs(model_path="dummy", tp_size=2, dp_size=2, enable_dp_attention=True)
    publish(record, role="scheduler", ranks=SpawnRanks())
    parallel, one_replica = get_parallel(), {"attn_dp_size": 1, "attn_tp_size": 2}
    with get_flags().dp.override(**flag):
        before = _in_force()
        with pytest.raises(RuntimeError, match=r"stamp of attn_dp_size, which sets .*states"):
            parallel.override_permanently(**one_replica)
        assert _in_force() == before and "attn_dp_size" not in parallel._stamp
        parallel.override_permanently(dp_rank=1)  # sets no flag
    assert get_flags().dp.enabled
    parallel.override_permanently(**one_replica)
    assert not get_flags().dp.enabled
    with get_flags().dp.override(**flag):
        with pytest.raises(RuntimeError, match=r"clear_stamp\(\) of attn_dp_size, which sets .*states"):
            parallel.clear_stamp()
        assert parallel.attn_dp_size == 1
    parallel.clear_stamp()
    assert get_flags().dp.enabled


def test_stamps_are_not_dropped_under_a_scope_that_was_checked_with_them() -> None:
    parallel = get_parallel()
    with parallel.override(nccl_port=1):
        with pytest.raises(RuntimeError, match=r"clear_stamp\(\) inside an open parallel scope, .*nccl_port"):
            parallel.clear_stamp()
        assert parallel.dp_rank is None
    parallel.clear_stamp()
    with pytest.raises(RuntimeError, match="rank bundle"):
        _ = parallel.dp_rank


# -- nobody comes in between -------------------------------------------------------------------------------


#: What must not be parted by a scope of another thread -> a step in its middle.
IN_ONE: dict[str, tuple[Callable[[], Any], tuple[Any, str]]] = {
    "publish": (PUBLISHING["publish"], (context_module, "build_publication")),
    "stamp": (
        lambda: get_parallel().override_permanently(nccl_port=1),
        (parallel_module, "validate_parallel"),
    ),
    "clear": (lambda: get_parallel().clear_stamp(), (ParallelContext, "_rebuild_layers")),
    "write": (lambda: get_context().override("a test", page_size=2), (ScopeStack, "states")),
    "replica": (
        lambda: initialize_dp_attention(hidden_size=1, dtype=torch.float32, device=torch.device("cpu")),
        (dp_attention, "derive_attention_ranks"),
    ),
}

#: Whose scopes each act excludes; a write only those of the namespace that it goes to.
EXCLUDED = {"publish": PLACES.keys() - {"forward"}, "write": {"bag"}}


def _free() -> set[str]:
    """The places in which another thread could open a scope now."""
    stacks = {
        "parallel": get_parallel()._scopes,
        "bag": get_schedule()._scopes,
        "flags": get_flags().dp._scopes,
        "forward": get_forward()._scopes,
    }
    free: set[str] = set()

    def probe() -> None:
        for place, stack in stacks.items():
            if stack._lock.acquire(blocking=False):
                stack._lock.release()
                free.add(place)

    other = threading.Thread(target=probe)
    other.start()
    other.join(60)
    return free


@pytest.mark.parametrize("name", IN_ONE)
def test_no_other_thread_opens_a_scope_between_the_check_and_the_write(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scope was checked against what was about to be replaced, and then stood over what replaced it."""
    act, (owner, step) = IN_ONE[name]
    real = getattr(owner, step)
    seen: list[set[str]] = []

    def held_up(*args: Any, **named: Any) -> Any:
        seen.append(_free())
        return real(*args, **named)

    assert _free() == PLACES.keys()
    monkeypatch.setattr(owner, step, held_up)
    act()
    assert PLACES.keys() - seen[-1] == EXCLUDED.get(name, {"parallel"})
    assert _free() == PLACES.keys(), "a lock was kept"


def test_the_probe_sees_an_act_that_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    for method in ("closed", "still"):
        monkeypatch.setattr(ScopeStack, method, lambda *_: nullcontext())
    with pytest.raises(AssertionError):
        test_no_other_thread_opens_a_scope_between_the_check_and_the_write("publish", monkeypatch)

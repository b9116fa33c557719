"""Published namespaces: where each leaf is, that nobody writes it by the way, and who replaced it."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import threading
from typing import Any

import pytest
import torch

from sglang.srt import runtime_context
from sglang.srt.arg_groups.fields import DERIVED, LEAVES
from sglang.srt.runtime_context import (
    get_context,
    get_exec,
    get_memory,
    get_parallel,
    get_schedule,
    publish,
)
from sglang.srt.runtime_context.parallel_names import COUNTS
from sglang.srt.server_args import ServerArgs

TOPS = (
    "model",
    "serving",
    "schedule",
    "memory",
    "exec",
    "spec",
    "lora",
    "disagg",
    "observability",
    "device",
    "mm",
)


def _publish(**fields: Any) -> None:
    publish(ServerArgs(model_path="dummy", **fields), role="test")


def _at(path: str) -> Any:
    top, _, part = path.partition(".")
    bag = getattr(runtime_context, f"get_{top}")()
    return getattr(bag, part) if part else bag


def test_every_declared_leaf_is_published_in_its_namespace_and_nowhere_else() -> None:
    _publish()
    record = ServerArgs(model_path="dummy")
    homes: dict[str, list[str]] = {}
    for path in {leaf.namespace for leaf in LEAVES.values()}:
        for name in get_parallel()._config if path == "parallel" else _at(path).values():
            homes.setdefault(name, []).append(path)
    quotients = {name: [path] for path, names in DERIVED.items() for name in names}
    counts = {name: ["parallel"] for name in COUNTS}
    assert homes == {name: [leaf.namespace] for name, leaf in LEAVES.items()} | quotients | counts
    for name, leaf in LEAVES.items():
        assert getattr(_at(leaf.namespace), name) == getattr(record, name), name


@pytest.mark.parametrize("top", TOPS)
def test_a_namespace_before_publish_names_itself(top: str) -> None:
    with pytest.raises(ValueError, match=f"config namespace '{top}' not published"):
        getattr(runtime_context, f"get_{top}")()


def test_a_name_that_is_not_there_says_where_it_is() -> None:
    _publish()
    with pytest.raises(AttributeError, match=r"'schedule' has no 'page_sise'; nearest: page_size"):
        _ = get_schedule().page_sise  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"it is in get_exec\(\)\.kernel"):
        _ = get_schedule().attention_backend  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"it is in get_exec\(\)\.kernel"):
        _ = get_exec().attention_backend  # type: ignore[attr-defined]


def test_a_bag_is_not_assigned() -> None:
    _publish()
    for name in ("page_size", "unknown"):
        with pytest.raises(AttributeError, match="read-only"):
            setattr(get_schedule(), name, 1)
    assert get_schedule().page_size is None


def test_a_scoped_override_nests_restores_and_checks_every_name_first() -> None:
    _publish(page_size=4)
    bag = get_schedule()
    with bag.override(page_size=8, max_prefill_tokens=1):
        with bag.override(page_size=16):
            assert bag.page_size == 16
        assert (bag.page_size, bag.max_prefill_tokens) == (8, 1)
    assert (bag.page_size, bag.max_prefill_tokens) == (4, 16384)
    with pytest.raises(ValueError, match="has no pages"), bag.override(page_size=1, pages=2):
        pass
    with pytest.raises(KeyError), bag.override(page_size=1):
        raise KeyError
    assert bag.page_size == 4


def test_a_permanent_override_is_logged_with_its_source() -> None:
    _publish(grammar_backend="xgrammar")
    get_context().override("grammar.import_fallback", grammar_backend="none", page_size=16)
    first, second = get_context().overrides_log()
    assert (first.source, first.namespace, first.name) == (
        "grammar.import_fallback",
        "exec.kernel",
        "grammar_backend",
    )
    assert (first.before, first.after) == ("xgrammar", "none")
    assert (second.namespace, second.name, second.before, second.after) == ("schedule", "page_size", None, 16)
    assert get_exec().kernel.grammar_backend == "none"
    assert get_context().server_args.grammar_backend == "xgrammar"


@pytest.mark.parametrize(
    "leaves, words",
    [
        ({"page_size": 2, "pagesize": 1}, "no published leaf is called 'pagesize'; nearest: page_size"),
        ({"page_size": 2, "tp_size": 2}, r"use get_parallel\(\)\.override"),
        ({"page_size": 2, "attn_tp_size": 2}, r"use get_parallel\(\)\.override"),
    ],
)
def test_a_refused_permanent_override_writes_and_logs_nothing(leaves: dict[str, Any], words: str) -> None:
    _publish()
    with pytest.raises(ValueError, match=words):
        get_context().override("a test", **leaves)
    assert get_schedule().page_size is None and get_context().overrides_log() == ()


def test_a_permanent_override_inside_a_scope_of_the_same_leaf_is_refused() -> None:
    """The closing scope would put the old value back, and the log would tell a value nobody reads."""
    _publish()
    with get_schedule().override(page_size=8):
        with pytest.raises(RuntimeError, match="stated by an open scope"):
            get_context().override("a test", max_prefill_tokens=1, page_size=16)
        assert get_schedule().max_prefill_tokens == 16384
        get_context().override("a test", max_prefill_tokens=1)
    assert (get_schedule().page_size, get_schedule().max_prefill_tokens) == (None, 1)
    get_context().override("a test", page_size=16)
    assert get_schedule().page_size == 16


def test_overriding_with_nothing_published_says_so() -> None:
    with pytest.raises(ValueError, match="nothing is published"):
        get_context().override("a test", page_size=1)


def test_values_that_follow_from_two_namespaces_are_real_booleans() -> None:
    for disabled, strategy, extra, lazy in [
        (False, "auto", False, False),
        (False, "extra_buffer", True, False),
        (False, "extra_buffer_lazy", True, True),
        (True, "extra_buffer_lazy", False, False),
    ]:
        _publish(disable_radix_cache=disabled, mamba_radix_cache_strategy=strategy)
        mamba = get_exec().mamba
        assert mamba.enable_mamba_extra_buffer is extra and mamba.enable_mamba_extra_buffer_lazy is lazy
        assert get_memory().disable_radix_cache is disabled


def test_a_bag_reads_the_same_in_every_thread_and_inside_one_graph() -> None:
    _publish(page_size=4)
    seen: list[Any] = []
    with get_schedule().override(page_size=8):
        worker = threading.Thread(target=lambda: seen.append(get_schedule().page_size))
        worker.start()
        worker.join()
        compiled = torch.compile(lambda x: x * get_schedule().page_size, fullgraph=True, backend="eager")
        assert compiled(torch.ones(1)).item() == 8
    assert seen == [8]

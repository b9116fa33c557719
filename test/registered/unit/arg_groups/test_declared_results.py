"""Results beside a record: kept by identity, gone with it, every decision remembered."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import dataclasses
import gc

import pytest

from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import (
    declare,
    declared_provenance,
    forget,
    record_of,
    resolution_result,
    resolved_view,
)
from sglang.srt.server_args import ServerArgs, pack_server_args, unpack_server_args


def decided(record):
    """What was decided beside the record: name -> value."""
    return {item.name: item.value for item in declared_provenance(record)}


@dataclasses.dataclass
class PlainArgs:
    """Not hashable, equal to its copy, and still publishable."""

    page_size: int | None = None
    chunked_prefill_size: int = -1


def test_a_declared_result_answers_and_the_record_does_not_change():
    record = ServerArgs(model_path="m")
    declare(record, "test", page_size=16)
    assert resolution_result(record, "page_size") == 16
    assert record.page_size is None
    assert resolution_result(record, "tp_size") == 1


def test_a_declared_none_is_a_result():
    record = ServerArgs(model_path="m", page_size=16)
    declare(record, "test", page_size=None)
    assert resolution_result(record, "page_size") is None


def test_equal_records_do_not_share_results():
    first, second = PlainArgs(), PlainArgs()
    declare(first, "test", page_size=4)
    assert (resolution_result(first, "page_size"), resolution_result(second, "page_size")) == (4, None)


def test_results_end_with_their_record():
    """The store is keyed by id, and ids are reused: an entry that stayed would speak for a stranger."""
    gc.collect()  # records of other tests must not go in the middle of this one
    before = len(overrides._store)
    record = ServerArgs(model_path="m")
    declare(record, "test", page_size=4)
    assert len(overrides._store) == before + 1
    del record
    gc.collect()
    assert len(overrides._store) == before


def test_a_reused_id_does_not_inherit_results():
    first, second = PlainArgs(), PlainArgs()
    declare(first, "test", page_size=4)
    overrides._store[id(second)] = overrides._store[id(first)]
    try:
        assert resolution_result(second, "page_size") is None
    finally:
        del overrides._store[id(second)]


def test_the_last_decision_wins_and_all_are_remembered():
    record = ServerArgs(model_path="m")
    declare(record, "first", page_size=4)
    declare(record, "second", page_size=8)
    assert decided(record) == {"page_size": 8}
    assert [(item.source, item.value) for item in declared_provenance(record)] == [
        ("first", 4),
        ("second", 8),
    ]


def test_an_undeclared_field_is_refused_and_nothing_is_kept():
    record = ServerArgs(model_path="m")
    with pytest.raises(ValueError, match="page_sise"):
        declare(record, "test", page_size=4, page_sise=4)
    assert decided(record) == {}


def test_an_object_that_cannot_be_followed_is_refused():
    with pytest.raises(TypeError, match="cannot be declared beside"):
        declare(object(), "test", page_size=1)


def test_forgetting_leaves_the_record():
    record = ServerArgs(model_path="m")
    declare(record, "test", page_size=4)
    forget(record)
    assert (resolution_result(record, "page_size"), declared_provenance(record)) == (None, ())


@pytest.mark.parametrize("view", [resolved_view, resolving_view])
def test_a_view_answers_results_and_falls_through(view):
    record = PlainArgs(page_size=2)
    record.undeclared = "raw"
    declare(record, "test", page_size=4)
    seen = view(record)
    assert (seen.page_size, seen.chunked_prefill_size, seen.undeclared) == (4, -1, "raw")
    assert record_of(seen) is record
    assert record_of(view(seen)) is record
    with pytest.raises(AttributeError):
        _ = seen.nothing_like_it
    with pytest.raises(AttributeError):
        seen.page_size = 8


def test_a_hook_may_decide_only_what_its_declaration_allows():
    view = resolving_view(ServerArgs(model_path="m"))
    with pytest.raises(TypeError, match="port, declared without resolvable=True"):
        view.declare("test", port=1)


def test_deciding_what_is_so_already_leaves_the_operator_as_its_author():
    record = ServerArgs(model_path="m", page_size=16)
    resolving_view(record).declare("test", page_size=16)
    assert declared_provenance(record) == ()


def test_filling_does_not_overrule():
    record = ServerArgs(model_path="m", page_size=16)
    resolving_view(record).fill("test", page_size=1, chunked_prefill_size=64)
    assert decided(record) == {"chunked_prefill_size": 64}


def test_a_child_receives_record_results_and_provenance():
    record = ServerArgs(model_path="m", tp_size=2)
    declare(record, "hook", random_seed=7)
    declare(record, "hook", page_size=4)
    twin = unpack_server_args(pack_server_args(record))
    assert twin is not record
    assert all(getattr(twin, name) == getattr(record, name) for name in ServerArgs.__struct_fields__)
    assert declared_provenance(twin) == declared_provenance(record)


def test_a_child_is_told_no_secret():
    """A rank asks nobody for a key, and its configuration may travel to another machine."""
    record = ServerArgs(model_path="m", api_key="hunter2", tp_size=2)
    declare(record, "hook", admin_api_key="hunter3")
    packed = pack_server_args(record)
    assert b"hunter" not in packed
    twin = unpack_server_args(packed)
    assert (twin.api_key, twin.tp_size, decided(twin)) == (None, 2, {})

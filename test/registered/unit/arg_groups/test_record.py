"""The record itself: built without questions, never written, compared by identity, silent about secrets."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

from sglang.srt.server_args import (
    ServerArgs,
    get_global_server_args,
    set_global_server_args_for_scheduler,
    set_global_server_args_for_tokenizer,
)


def test_building_a_record_opens_nothing_and_refuses_nothing_unserved():
    record = ServerArgs(model_path="/no/such/folder", tp_size=8, grammar_backend="xgrammar")
    assert (record.tp_size, record.grammar_backend) == (8, "xgrammar")


def test_a_record_cannot_be_written():
    record = ServerArgs(model_path="x")
    with pytest.raises(AttributeError):
        record.tp_size = 2
    assert record.tp_size == 1


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="tp_sizes"):
        ServerArgs(model_path="x", tp_sizes=2)


def test_equal_records_are_still_two_records():
    """What resolution declares is kept by identity; equality must not merge two of them in a dict."""
    first, second = ServerArgs(model_path="x"), ServerArgs(model_path="x")
    assert first != second
    assert len({first, second}) == 2


def test_mutable_defaults_are_not_shared():
    first, second = ServerArgs(model_path="x"), ServerArgs(model_path="x")
    first.allowed_media_domains.append("example.org")
    assert second.allowed_media_domains == []


def test_the_repr_shows_what_was_said_and_no_secret():
    text = repr(ServerArgs(model_path="x", tp_size=2, api_key="hunter2", admin_api_key="hunter3"))
    assert text == "ServerArgs(model_path='x', api_key=***, admin_api_key=***, tp_size=2)"
    assert "hunter" not in str(ServerArgs(model_path="x", api_key="hunter2"))


def test_the_old_getter_names_where_to_read():
    with pytest.raises(RuntimeError, match=r"runtime_context.*get_server_args\(\)"):
        get_global_server_args()


def test_the_two_old_setters_are_two_functions():
    assert set_global_server_args_for_scheduler is not set_global_server_args_for_tokenizer


def test_the_transfer_engine_question_may_be_asked_of_any_shape():
    """Callers hand over a plain object with the five fields."""

    class Shape:
        load_format = "remote_instance"
        remote_instance_weight_loader_backend = "transfer_engine"
        remote_instance_weight_loader_start_seed_via_transfer_engine = False
        modelexpress_config = None

    assert ServerArgs.remote_instance_weight_loader_use_transfer_engine(Shape()) is True
    assert ServerArgs.remote_instance_weight_loader_use_transfer_engine(Shape(), "auto") is False
    assert ServerArgs(model_path="x").remote_instance_weight_loader_use_transfer_engine() is False

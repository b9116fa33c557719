"""Refusals at the door: every declared setting that this build would have to ignore, by name."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

from sglang.srt.arg_groups.arg_utils import Arg, Leaf, strip_optional
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.fields.exec_ import CudaGraphConfig
from sglang.srt.arg_groups.supported import is_served, refusal, refuse_unserved
from sglang.srt.server_args import ServerArgs


def another_value(leaf: Leaf):
    """Any value that is not the default and not among the served ones."""
    inner, _ = strip_optional(leaf.type)
    if leaf.kind in ("switch", "toggle"):
        return True
    if leaf.kind == "list":
        return ["something"]
    if leaf.kind == "json":
        return CudaGraphConfig() if inner is CudaGraphConfig else {"a": 1}
    if leaf.kind == "str":
        return "something"
    return (leaf.default or 0) + 7


UNSERVED = [leaf for leaf in LEAVES.values() if leaf.arg.served is False]
PARTLY = [leaf for leaf in LEAVES.values() if isinstance(leaf.arg.served, tuple)]


def test_a_record_of_defaults_is_served(resolved):
    refuse_unserved(ServerArgs(model_path="m"))
    refuse_unserved(resolved())


@pytest.mark.parametrize("leaf", UNSERVED, ids=lambda leaf: leaf.name)
def test_an_unserved_setting_is_refused_by_its_flag(leaf):
    record = ServerArgs(**{"model_path": "m", leaf.name: another_value(leaf)})
    with pytest.raises(ValueError, match=f"{leaf.label}.* is not served yet; ."):
        refuse_unserved(record)


@pytest.mark.parametrize("leaf", PARTLY, ids=lambda leaf: leaf.name)
def test_a_partly_served_setting_takes_its_values_and_no_other(leaf):
    for value in leaf.arg.served:
        assert is_served(leaf, [value] if leaf.kind == "list" else value)
    if leaf.kind not in ("switch", "toggle"):
        assert not is_served(leaf, another_value(leaf))


def test_a_list_is_served_only_when_every_item_is():
    leaf = LEAVES["log_requests_target"]
    assert is_served(leaf, ["stdout"])
    assert not is_served(leaf, ["stdout", "/var/log"])


def test_a_switch_that_asks_for_what_is_so_is_accepted(resolved):
    refuse_unserved(
        resolved(
            disable_overlap_schedule=True,
            sleep_on_idle=True,
            disable_custom_all_reduce=True,
            enable_deterministic_inference=True,
            enable_lora=False,
            attention_backend="torch_native",
            grammar_backend="none",
            cuda_graph_backend_decode="disabled",
        )
    )


def test_every_refusal_is_named_at_once():
    record = ServerArgs(model_path="m", pp_size=2, enable_metrics=True, speculative_algorithm="DFLASH")
    with pytest.raises(ValueError) as caught:
        refuse_unserved(record)
    assert str(caught.value).splitlines() == [
        "--pp-size 2 is not served yet; leave it out: pipeline stages come later; --tp-size N spreads a "
        "model over ranks",
        "--speculative-algorithm DFLASH is not served yet; use EAGLE3, EAGLE or STANDALONE with a draft "
        "model, or NGRAM without one: block drafts come later",
        "--enable-metrics is not served yet; leave it out and read the log lines: metrics come later",
    ]


def test_a_secret_is_not_shown_in_a_refusal():
    leaf = Leaf("token", "serving", str | None, None, Arg(help="t.", secret=True), "str")
    assert refusal(leaf, "hunter2") == "--token is not served yet; leave it out (default: None)"


def test_declaring_a_setting_served_lets_it_through(monkeypatch):
    """The twin: the declaration is the only list, so flipping it is all a later change needs."""
    leaf = LEAVES["enable_metrics"]
    served = Leaf(leaf.name, leaf.namespace, leaf.type, leaf.default, Arg(help="m.", served=True), leaf.kind)
    monkeypatch.setitem(LEAVES, "enable_metrics", served)
    refuse_unserved(ServerArgs(model_path="m", enable_metrics=True))

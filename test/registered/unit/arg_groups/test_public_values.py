"""What information routes may show: resolved values, and never a secret."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json

from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.public_values import public_values, short_description
from sglang.srt.server_args import ServerArgs


def test_values_are_resolved_and_json_ready(resolved):
    record = resolved(cuda_graph_config={"decode": {"max_bs": 4}})
    values = public_values(record)
    assert values["page_size"] == 1
    assert values["cuda_graph_config"]["decode"]["max_bs"] == 4
    json.dumps(values)


def test_no_secret_is_shown(resolved):
    record = resolved(api_key="hunter2", admin_api_key="hunter3")
    assert "hunter" not in json.dumps(public_values(record))
    assert set(LEAVES) - set(public_values(record)) == {"api_key", "admin_api_key"}


def test_a_field_becomes_hidden_by_its_mark_alone(monkeypatch):
    leaf = LEAVES["weight_version"]
    arg = type(leaf.arg)(help="w.", secret=True)
    monkeypatch.setitem(
        LEAVES, leaf.name, Leaf(leaf.name, leaf.namespace, leaf.type, leaf.default, arg, leaf.kind)
    )
    record = ServerArgs(model_path="m", weight_version="hunter2")
    assert "weight_version" not in public_values(record)
    assert short_description(record) == "ServerArgs(model_path='m', weight_version=***)"

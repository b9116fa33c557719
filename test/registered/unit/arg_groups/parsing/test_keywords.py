"""Keyword construction, as Engine(**settings) uses it: the same names and the same errors as elsewhere."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.server_args import ServerArgs


def test_fields_aliases_and_inputs_are_taken():
    record = ServerArgs.from_kwargs(model=Path("/m"), tp=4, attn_dp_size=2, context_length="1Ki")
    assert (record.model_path, record.tp_size, record.context_length) == ("/m", 4, 1024)
    assert (record.dp_size, record.enable_dp_attention) == (2, True)


def test_a_private_field_may_be_stated_by_name():
    record = ServerArgs.from_kwargs(model_path="m", _speculative_draft_quantization_explicitly_set=True)
    assert record._speculative_draft_quantization_explicitly_set is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_sise": 2}, "no setting is called 'tp_sise'; the nearest are"),
        ({"port": "x"}, "--port got 'x'"),
        ({"enable_cache_report": "yes"}, "--enable-cache-report got 'yes'"),
        ({"tp_size": 2, "tp": 2}, "'tp_size' and 'tp' are the same setting"),
        ({"attn_dp_size": 0}, "must be at least 1"),
    ],
)
def test_a_mistake_is_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        ServerArgs.from_kwargs(model_path="m", **settings)


def test_the_model_must_be_given():
    with pytest.raises(ValueError, match="model_path must be given"):
        ServerArgs.from_kwargs(port=1)


def test_a_keyword_with_a_better_spelling_shows_the_callers_line():
    """Also through the package's own doors: a line of ours would tell nobody which of his calls is meant."""
    door: dict[str, Any] = {"__name__": "sglang.srt.entrypoints.some_door", "ServerArgs": ServerArgs}
    exec("def build(**settings):\n    return ServerArgs.from_kwargs(**settings)", door)
    for build in (ServerArgs.from_kwargs, door["build"]):
        with pytest.warns(FutureWarning, match="--attn-dp-size N") as caught:
            build(model_path="m", tp_size=2, dp_size=2, enable_dp_attention=True)
        assert [warning.filename for warning in caught] == [__file__]

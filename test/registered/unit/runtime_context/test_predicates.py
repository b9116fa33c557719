"""Questions over several leaves: pinned values on both tiers, and twins that a planted constant cannot
pass."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt import runtime_context
from sglang.srt.arg_groups import overrides, prefill_buffer_ceiling
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.runtime_context import get_parallel, get_schedule, publish
from sglang.srt.server_args import ServerArgs

_GRAPH = SimpleNamespace(decode=SimpleNamespace(max_bs=64))
_SEED = "remote_instance_weight_loader_start_seed_via_transfer_engine"

Pin = tuple[dict[str, Any], tuple[Any, ...], Any]

#: rule over a record -> (what is asked of the published context, (fields, arguments, answer)...)
PINS: dict[str, tuple[Callable[..., Any], list[Pin]]] = {
    "max_prefill_buffer_tokens": (
        runtime_context.max_prefill_buffer_tokens,
        [
            ({"chunked_prefill_size": 4096}, (), 4096),
            ({"chunked_prefill_size": -1, "max_prefill_tokens": 1024}, (), 1024),
            ({"chunked_prefill_size": 8192, "enable_dynamic_chunking": True, "pp_size": 4}, (), 16384),
            ({"chunked_prefill_size": 8192, "enable_dynamic_chunking": True, "pp_size": 1}, (), 8192),
        ],
    ),
    "attention_backends_of": (
        runtime_context.attention_backends,
        [
            ({}, (), (None, None)),
            ({"attention_backend": "triton"}, (), ("triton", "triton")),
            ({"attention_backend": "triton", "decode_attention_backend": "fa3"}, (), ("triton", "fa3")),
            ({"prefill_attention_backend": "fa3"}, (), ("fa3", None)),
        ],
    ),
    "remote_instance_transfer_engine_of": (
        runtime_context.remote_instance_transfer_engine_enabled,
        [
            ({}, (), False),
            ({_SEED: True}, (), True),
            ({"remote_instance_weight_loader_backend": "transfer_engine"}, ("remote_instance",), True),
            (
                {
                    "load_format": "remote_instance",
                    "remote_instance_weight_loader_backend": "modelexpress",
                    "modelexpress_config": '{"transport": "nixl"}',
                },
                (),
                False,
            ),
        ],
    ),
    "pre_capture_activation_reserve_mb_of": (
        runtime_context.pre_capture_activation_reserve_mb,
        [
            ({"chunked_prefill_size": 8192}, (None,), 0),
            ({"chunked_prefill_size": 8192}, (80 * 1024,), 1024),
            ({"chunked_prefill_size": 8192}, (4 * 1024,), 512),  # never more than an eighth of the device
            (
                {
                    "disaggregation_mode": "decode",
                    "cuda_graph_config": _GRAPH,
                    "speculative_num_draft_tokens": 4,
                },
                (80 * 1024,),
                32,
            ),
        ],
    ),
}


def _check(rule: str) -> None:
    """Every pin of one rule, on the record, on both views of it and on the published context."""
    of_context, pins = PINS[rule]
    for fields, arguments, answer in pins:
        record = ServerArgs(model_path="dummy", **fields)
        publish(record, role="test")
        for config in (record, overrides.resolved_view(record), resolving_view(record)):
            assert getattr(overrides, rule)(config, *arguments) == answer, (fields, arguments)
        assert of_context(*arguments) == answer, (fields, arguments)


@pytest.mark.parametrize("rule", sorted(PINS))
def test_the_pinned_answers_hold_on_both_tiers(rule: str) -> None:
    _check(rule)


@pytest.mark.parametrize("rule", sorted(PINS))
def test_a_constant_in_place_of_the_rule_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement of two tiers proves nothing when both answer a constant. Each pinned answer is planted in
    turn."""
    for _, _, answer in PINS[rule][1]:
        monkeypatch.setattr(overrides, rule, lambda *args, _answer=answer, **kwargs: _answer)
        with pytest.raises(AssertionError):
            _check(rule)


def test_the_published_tier_asks_the_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second spelling of a rule would not see what is planted here."""
    for rule, (of_context, pins) in PINS.items():
        planted = object()
        fields, arguments, _ = pins[0]
        publish(ServerArgs(model_path="dummy", **fields), role="test")
        with monkeypatch.context() as patch:
            patch.setattr(overrides, rule, lambda *args, _planted=planted, **kwargs: _planted)
            assert of_context(*arguments) is planted


def test_the_published_tier_follows_scopes_and_the_provider_gets_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_buffer_ceiling, "_prefill_buffer_ceiling_fn", None)
    record = ServerArgs(model_path="dummy", chunked_prefill_size=128, enable_dynamic_chunking=True)
    publish(record, role="test")
    asked = []

    @prefill_buffer_ceiling.register_prefill_buffer_ceiling
    def provider(config: Any, default_ceiling: int) -> int:
        asked.append(config)
        return default_ceiling + 1

    assert runtime_context.max_prefill_buffer_tokens() == 129
    with get_schedule().override(chunked_prefill_size=64):
        assert runtime_context.max_prefill_buffer_tokens() == 65
    with get_parallel().override(pp_size=2):
        assert runtime_context.max_prefill_buffer_tokens() == 16385
    assert all(config is record for config in asked) and len(asked) == 3

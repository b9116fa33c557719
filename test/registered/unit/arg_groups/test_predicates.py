"""Rules that both tiers ask: four pinned values each, and a twin that shows that a constant would not pass.

Agreement between the tiers alone would be satisfied by any constant.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.arg_groups import prefill_buffer_ceiling
from sglang.srt.arg_groups.adaptive_config import AdaptiveSlot, adaptive_slots, all_candidate_steps
from sglang.srt.arg_groups.fields import DERIVED
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare,
    mamba_cache_chunk_size,
    max_prefill_buffer_tokens,
    max_speculative_num_draft_tokens_of,
    pre_capture_activation_reserve_mb_of,
    remote_instance_transfer_engine_of,
    resolved_view,
)
from sglang.srt.server_args import ServerArgs

#: (the fields of a record, further arguments of the rule, the answer)
Pins = list[tuple[dict[str, Any], tuple[Any, ...], Any]]


def strategy(name: str, disable_radix_cache: bool = False) -> dict[str, Any]:
    return {"disable_radix_cache": disable_radix_cache, "mamba_radix_cache_strategy": name}


EXTRA_BUFFER: Pins = [
    (strategy("extra_buffer"), (), True),
    (strategy("extra_buffer_lazy"), (), True),
    (strategy("extra_buffer", disable_radix_cache=True), (), False),
    (strategy("auto"), (), False),
]
EXTRA_BUFFER_LAZY: Pins = [
    (strategy("extra_buffer"), (), False),
    (strategy("extra_buffer_lazy"), (), True),
    (strategy("extra_buffer_lazy", disable_radix_cache=True), (), False),
    (strategy("no_buffer"), (), False),
]
MAMBA_CHUNK: Pins = [
    ({"page_size": None}, (), 64),
    ({"page_size": 16}, (), 64),
    ({"page_size": 128}, (), 128),
    ({"page_size": 48}, (), 192),
]


def backends(common: str | None, prefill: str | None, decode: str | None) -> dict[str, Any]:
    return {
        "attention_backend": common,
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
    }


BACKENDS: Pins = [
    (backends("triton", None, None), (), ("triton", "triton")),
    (backends("triton", "fa3", None), (), ("fa3", "triton")),
    (backends(None, None, "fa3"), (), (None, "fa3")),
    (backends(None, None, None), (), (None, None)),
]


def ceiling(chunk: int | None, budget: int, dynamic: bool = False, stages: int = 1) -> dict[str, Any]:
    return {
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": budget,
        "enable_dynamic_chunking": dynamic,
        "pp_size": stages,
    }


CEILING: Pins = [
    (ceiling(4096, 16384), (), 4096),
    (ceiling(8192, 16384, True, 4), (), 16384),
    (ceiling(8192, 32768, True, 4), (), 32768),
    (ceiling(8192, 2048, True, 4), (), 8192),
    (ceiling(8192, 16384, True, 1), (), 8192),
    (ceiling(-1, 2048), (), 2048),
    (ceiling(0, 1000, True, 4), (), 1000),
    (ceiling(None, 512), (), 512),
]


def engine(load_format: str, backend: str, config: str | None = None, seed: bool = False) -> dict[str, Any]:
    return {
        "load_format": load_format,
        "remote_instance_weight_loader_backend": backend,
        "modelexpress_config": config,
        "remote_instance_weight_loader_start_seed_via_transfer_engine": seed,
    }


VIA_ENGINE, VIA_NIXL = '{"transport": "transfer_engine"}', '{"transport": "nixl"}'
TRANSFER: Pins = [
    (engine("remote_instance", "transfer_engine"), (), True),
    (engine("auto", "transfer_engine"), (), False),
    (engine("auto", "transfer_engine"), ("remote_instance",), True),
    (engine("remote_instance", "transfer_engine"), ("auto",), False),
    (engine("remote_instance", "nccl"), (), False),
    (engine("remote_instance", "modelexpress", VIA_ENGINE), (), True),
    (engine("remote_instance", "modelexpress", VIA_NIXL), (), False),
    (engine("remote_instance", "modelexpress"), (), False),
    (engine("auto", "nccl", seed=True), (), True),
]


def reserve(
    mode: str = "null",
    tokens: int = 8192,
    rows: int | None = None,
    captured: int | None = None,
    drafts: int | None = None,
) -> dict[str, Any]:
    return {
        **ceiling(tokens, 16384),
        "disaggregation_mode": mode,
        "max_running_requests": rows,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(max_bs=captured)),
        "speculative_num_draft_tokens": drafts,
    }


RESERVE: Pins = [
    (reserve(), (None,), 0),
    (reserve(), (80 * 1024,), 1024),
    (reserve(tokens=1024), (80 * 1024,), 128),
    (reserve(), (4 * 1024,), 512),
    (reserve("decode", rows=32), (80 * 1024,), 4),
    (reserve("decode", captured=64, drafts=4), (80 * 1024,), 32),
    (reserve("decode"), (80 * 1024,), 32),
    ({**reserve("decode"), "cuda_graph_config": None}, (80 * 1024,), 32),
]


def drafts(tokens: int | None, adaptive: bool = False) -> dict[str, Any]:
    return {
        "speculative_num_draft_tokens": tokens,
        "speculative_adaptive": adaptive,
        "speculative_adaptive_config": None,
    }


DRAFTS: Pins = [
    (drafts(3), (), 3),
    (drafts(3, adaptive=True), (), 8),
    (drafts(9, adaptive=True), (), 9),
    (drafts(None, adaptive=True), (), None),
]


def declared(name: str) -> Callable[..., Any]:
    """The rule of a derived name, as publish calls it."""
    derived = DERIVED["exec.mamba"][name]

    def ask(config: Any) -> Any:
        return derived.compute(**{given: getattr(config, given) for given in derived.inputs})

    return ask


RULES: dict[str, tuple[Callable[..., Any], Pins]] = {
    "extra_buffer": (declared("enable_mamba_extra_buffer"), EXTRA_BUFFER),
    "extra_buffer_lazy": (declared("enable_mamba_extra_buffer_lazy"), EXTRA_BUFFER_LAZY),
    "mamba_chunk": (mamba_cache_chunk_size, MAMBA_CHUNK),
    "attention_backends": (attention_backends_of, BACKENDS),
    "prefill_ceiling": (max_prefill_buffer_tokens, CEILING),
    "transfer_engine": (remote_instance_transfer_engine_of, TRANSFER),
    "activation_reserve": (pre_capture_activation_reserve_mb_of, RESERVE),
    "draft_bound": (max_speculative_num_draft_tokens_of, DRAFTS),
}


def failures(rule: Callable[..., Any], pins: Pins) -> list[dict[str, Any]]:
    return [
        fields
        for fields, arguments, wanted in pins
        if (answer := rule(SimpleNamespace(**fields), *arguments)) != wanted
        or type(answer) is not type(wanted)
    ]


@pytest.mark.parametrize("name", RULES)
def test_the_rule_answers_its_pinned_values(name):
    rule, pins = RULES[name]
    assert len(pins) >= 4
    assert failures(rule, pins) == []


@pytest.mark.parametrize("name", RULES)
def test_a_constant_would_not_pass(name):
    """Whatever single answer is planted for the rule, some pin notices."""
    _, pins = RULES[name]
    for _, _, planted in pins:
        assert failures(lambda *_, planted=planted: planted, pins)


def test_a_config_that_is_no_json_is_named():
    with pytest.raises(ValueError, match="--modelexpress-config is not JSON"):
        remote_instance_transfer_engine_of(SimpleNamespace(**engine("remote_instance", "modelexpress", "{")))


# Over a record: declared results count, and the record is handed to a provider.


def test_a_record_answers_with_its_declared_results():
    record = ServerArgs(model_path="m", speculative_num_draft_tokens=3)
    declare(record, "test", chunked_prefill_size=2048, attention_backend="triton", page_size=96)
    assert max_prefill_buffer_tokens(record) == 2048
    assert attention_backends_of(resolved_view(record)) == ("triton", "triton")
    assert mamba_cache_chunk_size(record) == 192
    assert max_speculative_num_draft_tokens_of(record) == 3
    assert remote_instance_transfer_engine_of(record) is False
    assert pre_capture_activation_reserve_mb_of(record, None) == 0
    assert pre_capture_activation_reserve_mb_of(record, 80 * 1024) == 256


def test_a_seeded_chunk_stands_for_the_rule():
    record = ServerArgs(model_path="m")
    record.__dict__["_mamba_cache_chunk_size"] = 32
    assert mamba_cache_chunk_size(record) == 32


def test_one_provider_has_the_last_word_about_the_ceiling(monkeypatch):
    monkeypatch.setattr(prefill_buffer_ceiling, "_prefill_buffer_ceiling_fn", None)
    record = ServerArgs(model_path="m", chunked_prefill_size=100)
    seen = []

    def provider(given, default):
        seen.append(given)
        return default + 5

    register = prefill_buffer_ceiling.register_prefill_buffer_ceiling
    assert max_prefill_buffer_tokens(record) == 100
    assert register(provider) is provider
    assert register(provider) is provider
    assert max_prefill_buffer_tokens(resolved_view(record)) == 105
    assert seen == [record]
    with pytest.raises(RuntimeError, match="already registered"):
        register(lambda given, default: default)
    assert max_prefill_buffer_tokens(record) == 105


# The adaptive file.


@pytest.fixture
def adaptive(tmp_path):
    def write(content: Any) -> str:
        path = tmp_path / "adaptive.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def test_the_candidates_are_read_again_at_each_ask(adaptive):
    path = adaptive({"1": {"candidate_steps": [2]}})
    record = ServerArgs(
        model_path="m",
        speculative_num_draft_tokens=3,
        speculative_adaptive=True,
        speculative_adaptive_config=path,
    )
    assert max_speculative_num_draft_tokens_of(record) == 3
    adaptive({"1": {"candidate_steps": [2]}, "8": {"candidate_steps": [0, 6]}})
    assert max_speculative_num_draft_tokens_of(record) == 7


def test_slots_ascend_and_share_the_defaults_of_the_file(adaptive):
    path = adaptive({"candidate_steps": [1], "32": {}, "8": {"candidate_steps": [3, 2]}})
    assert {size: slot.candidate_steps for size, slot in adaptive_slots(path).items()} == {
        8: (2, 3),
        32: (1,),
    }
    assert list(adaptive_slots(path)) == [8, 32]
    assert all_candidate_steps(True, path) == (1, 2, 3)
    assert all_candidate_steps(False, path) == ()
    assert all_candidate_steps(True, None) == (0, 1, 3, 5, 7)


def test_a_slot_has_knobs_of_its_own_and_the_defaults_of_the_file(adaptive):
    path = adaptive(
        {"ema_alpha": 0.5, "1": {"candidate_steps": [1], "ceiling_coeff": 2}, "8": {"candidate_steps": [0]}}
    )
    first, second = adaptive_slots(path).values()
    assert first == AdaptiveSlot(candidate_steps=(1,), ema_alpha=0.5, ceiling_coeff=2.0)
    assert second == AdaptiveSlot(candidate_steps=(0,), ema_alpha=0.5)
    assert (second.update_interval, second.warmup_batches) == (5, 10)
    assert (second.up_hysteresis, second.down_hysteresis, second.ceiling_coeff) == (0.0, -0.25, 0.0)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("ema_alpha", 0),
        ("ema_alpha", 1.5),
        ("update_interval", 0),
        ("update_interval", 2.5),
        ("warmup_batches", -1),
        ("up_hysteresis", "high"),
        ("ceiling_coeff", -1),
        ("ema_alfa", 0.2),
    ],
)
def test_a_knob_outside_its_limits_is_refused_with_its_slot(adaptive, knob, value):
    path = adaptive({"4": {"candidate_steps": [1], knob: value}})
    with pytest.raises(ValueError, match=f"--speculative-adaptive-config .*batch size 4 .*{knob}"):
        adaptive_slots(path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"1": {"candidate_steps": [1], "up_hysteresis": NaN}}',
        "[1]",
        {},
        {"1": []},
        {"1": {}},
        {"1": {"candidate_steps": []}},
        {"1": {"candidate_steps": [-1]}},
        {"1": {"candidate_steps": [True]}},
    ],
)
def test_a_broken_adaptive_file_is_refused_by_its_flag(adaptive, content):
    with pytest.raises(ValueError, match="--speculative-adaptive-config"):
        all_candidate_steps(True, adaptive(content))


@pytest.mark.parametrize(
    "content",
    [
        '{"1": {"candidate_steps": [1]}, "01": {"candidate_steps": [3]}}',
        '{"4": {"candidate_steps": [1]}, "4": {"candidate_steps": [3]}}',
        '{"4": {"candidate_steps": [1], "candidate_steps": [3]}}',
    ],
)
def test_a_key_that_stands_twice_is_refused(adaptive, content):
    """One of the two would be lost without a word."""
    with pytest.raises(ValueError, match=r"--speculative-adaptive-config .* stands twice in one object"):
        adaptive_slots(adaptive(content))

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

from sglang.srt.arg_groups import predicates, prefill_buffer_ceiling
from sglang.srt.arg_groups.adaptive_config import all_candidate_steps, candidate_steps_by_batch_size
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

Pins = list[tuple[dict[str, Any], Any]]

EXTRA_BUFFER: Pins = [
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "extra_buffer"}, True),
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, True),
    ({"disable_radix_cache": True, "mamba_radix_cache_strategy": "extra_buffer"}, False),
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "auto"}, False),
]
EXTRA_BUFFER_LAZY: Pins = [
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "extra_buffer"}, False),
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, True),
    ({"disable_radix_cache": True, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, False),
    ({"disable_radix_cache": False, "mamba_radix_cache_strategy": "no_buffer"}, False),
]
MAMBA_CHUNK: Pins = [
    ({"page_size": None}, 64),
    ({"page_size": 16}, 64),
    ({"page_size": 128}, 128),
    ({"page_size": 48}, 192),
]
BACKENDS: Pins = [
    ({"common": "triton", "prefill": None, "decode": None}, ("triton", "triton")),
    ({"common": "triton", "prefill": "fa3", "decode": None}, ("fa3", "triton")),
    ({"common": None, "prefill": None, "decode": "fa3"}, (None, "fa3")),
    ({"common": None, "prefill": None, "decode": None}, (None, None)),
]


def ceiling(chunk: int | None, budget: int, dynamic: bool, stages: int) -> dict[str, Any]:
    return {
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": budget,
        "enable_dynamic_chunking": dynamic,
        "pp_size": stages,
    }


CEILING: Pins = [
    (ceiling(4096, 16384, False, 1), 4096),
    (ceiling(8192, 16384, True, 4), 16384),
    (ceiling(8192, 32768, True, 4), 32768),
    (ceiling(8192, 2048, True, 4), 8192),
    (ceiling(8192, 16384, True, 1), 8192),
    (ceiling(-1, 2048, False, 1), 2048),
    (ceiling(0, 1000, True, 4), 1000),
    (ceiling(None, 512, False, 1), 512),
]


def engine(
    load_format: str, backend: str, config: str | None = None, seed: bool = False, override: str | None = None
) -> dict[str, Any]:
    return {
        "load_format": load_format,
        "backend": backend,
        "modelexpress_config": config,
        "start_seed": seed,
        "override": override,
    }


VIA_ENGINE, VIA_NIXL = '{"transport": "transfer_engine"}', '{"transport": "nixl"}'
TRANSFER: Pins = [
    (engine("remote_instance", "transfer_engine"), True),
    (engine("auto", "transfer_engine"), False),
    (engine("auto", "transfer_engine", override="remote_instance"), True),
    (engine("remote_instance", "transfer_engine", override="auto"), False),
    (engine("remote_instance", "nccl"), False),
    (engine("remote_instance", "modelexpress", VIA_ENGINE), True),
    (engine("remote_instance", "modelexpress", VIA_NIXL), False),
    (engine("remote_instance", "modelexpress"), False),
    (engine("auto", "nccl", seed=True), True),
]


def reserve(
    gpu: int | None,
    mode: str = "null",
    tokens: int = 8192,
    rows: int | None = None,
    captured: int | None = None,
    drafts: int | None = None,
) -> dict[str, Any]:
    return {
        "gpu_mem_mb": gpu,
        "disaggregation_mode": mode,
        "prefill_tokens": tokens,
        "max_running_requests": rows,
        "captured_decode_bs": captured,
        "num_draft_tokens": drafts,
    }


RESERVE: Pins = [
    (reserve(None), 0),
    (reserve(80 * 1024), 1024),
    (reserve(80 * 1024, tokens=1024), 128),
    (reserve(4 * 1024), 512),
    (reserve(80 * 1024, "decode", rows=32), 4),
    (reserve(80 * 1024, "decode", captured=64, drafts=4), 32),
    (reserve(80 * 1024, "decode"), 32),
]
DRAFTS: Pins = [
    ({"num_draft_tokens": 3, "candidate_steps": (2,)}, 3),
    ({"num_draft_tokens": 3, "candidate_steps": (4,)}, 5),
    ({"num_draft_tokens": 3, "candidate_steps": (1, 3, 7)}, 8),
    ({"num_draft_tokens": 3, "candidate_steps": ()}, 3),
    ({"num_draft_tokens": None, "candidate_steps": (4,)}, None),
]

RULES: dict[str, tuple[Callable[..., Any], Pins]] = {
    "extra_buffer": (predicates.mamba_extra_buffer, EXTRA_BUFFER),
    "extra_buffer_lazy": (predicates.mamba_extra_buffer_lazy, EXTRA_BUFFER_LAZY),
    "mamba_chunk": (predicates.mamba_chunk_size, MAMBA_CHUNK),
    "attention_backends": (predicates.attention_backend_pair, BACKENDS),
    "prefill_ceiling": (predicates.prefill_token_ceiling, CEILING),
    "transfer_engine": (predicates.uses_transfer_engine, TRANSFER),
    "activation_reserve": (predicates.activation_reserve_mb, RESERVE),
    "draft_bound": (predicates.max_draft_tokens, DRAFTS),
}


def failures(rule: Callable[..., Any], pins: Pins) -> list[dict[str, Any]]:
    return [
        given
        for given, wanted in pins
        if (answer := rule(**given)) != wanted or type(answer) is not type(wanted)
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
    for _, planted in pins:
        assert failures(lambda planted=planted, **_: planted, pins)


def test_a_config_that_is_no_json_is_named():
    with pytest.raises(ValueError, match="--modelexpress-config is not JSON"):
        predicates.uses_transfer_engine(**engine("remote_instance", "modelexpress", "{"))


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


def test_the_graph_config_bounds_a_decode_server():
    shape = SimpleNamespace(
        **ceiling(8192, 16384, False, 1),
        disaggregation_mode="decode",
        max_running_requests=None,
        speculative_num_draft_tokens=None,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=64)),
    )
    assert pre_capture_activation_reserve_mb_of(shape, 80 * 1024) == 8


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
    assert candidate_steps_by_batch_size(path) == {8: (3, 2), 32: (1,)}
    assert list(candidate_steps_by_batch_size(path)) == [8, 32]
    assert all_candidate_steps(True, path) == (1, 2, 3)
    assert all_candidate_steps(False, path) == ()
    assert all_candidate_steps(True, None) == (0, 1, 3, 5, 7)


@pytest.mark.parametrize(
    "content",
    [
        "{",
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

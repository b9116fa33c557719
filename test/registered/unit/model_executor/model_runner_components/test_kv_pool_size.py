from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import (
    HostMemory,
    least_budget_bytes,
    make_kv_pools,
    pool_budget_bytes,
    pool_tokens,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.runtime_context.widths import requests_per_replica
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.test_utils import published_topology

GIB = 1 << 30
ONE = {"world_rank": 0, "dp_rank": None}


@pytest.mark.parametrize(
    "available, ranks, expected",
    [(100 * GIB, 1, 2 * GIB), (100 * GIB, 4, GIB // 2), (4 * GIB, 1, GIB), (4 * GIB, 2, GIB // 2)],
)
def test_the_default_is_the_smaller_of_2_gib_and_a_quarter_over_all_ranks(available, ranks, expected):
    budget = pool_budget_bytes(
        available_before=available, available_now=available, mem_fraction=None, ranks=ranks
    )
    assert budget == expected


def test_a_fraction_covers_weights_and_pool_together():
    budget = pool_budget_bytes(available_before=10 * GIB, available_now=7 * GIB, mem_fraction=0.5, ranks=1)
    assert budget == 2 * GIB


def tokens(**changes):
    given = {
        "budget_bytes": 10_000,
        "bytes_per_token": 10,
        "page_size": 16,
        "max_total_tokens": None,
        "useful": 10**6,
    }
    return pool_tokens(**{**given, **changes})


def test_the_pool_is_whole_pages_of_what_fits():
    assert tokens() == 992
    assert tokens(page_size=1) == 1000


def test_the_flag_caps_the_pool_and_what_is_useful_caps_the_default():
    assert tokens(max_total_tokens=100) == 96
    assert tokens(useful=64) == 64
    assert tokens(max_total_tokens=10**9) == 992


@pytest.mark.parametrize("changes", [{"budget_bytes": 159}, {"max_total_tokens": 15}, {"budget_bytes": -5}])
def test_no_room_for_a_page_is_an_error_with_the_numbers_and_the_cure(changes):
    with pytest.raises(ValueError, match=r"one page of 16 tokens.*--max-total-tokens"):
        tokens(**changes)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, 4),
        ({"tp_size": 4, "dp_size": 2}, 8),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
        ({"tp_size": 3, "nnodes": 2}, 2),
    ],
)
def test_ranks_of_the_host_share_the_memory(fields, expected):
    with published_topology(ranks=ONE, **fields):
        assert get_parallel().ranks_on_host == expected


def test_a_request_table_that_memory_cannot_hold_is_refused_with_the_cure():
    """A torn context length, say: its table must not be tried."""
    spec = KVSpec(1, 1, 8, torch.float32)
    with (
        published_topology(max_total_tokens=64, ranks=ONE),
        pytest.raises(ValueError, match=r"table of 16 requests of 4294967295 tokens.*--context-length"),
    ):
        make_kv_pools(
            spec,
            TorchNativeBackend.kv_layout,
            context_len=2**32 - 1,
            device=torch.device("cpu"),
            available_before=4 * GIB,
            available_now=4 * GIB,
        )


SEEN = HostMemory(0, 100 * GIB, 90 * GIB)


def test_ranks_that_load_together_count_what_all_of_them_took():
    """A rank that measured early saw too little taken, one that began late too little to begin with."""
    seen = [HostMemory(0, 100 * GIB, 95 * GIB), HostMemory(0, 97 * GIB, 90 * GIB)]
    assert least_budget_bytes(seen, mem_fraction=0.5, ranks=2) == 20 * GIB
    assert least_budget_bytes(seen, mem_fraction=None, ranks=2) == GIB


def test_the_poorest_host_decides():
    seen = [SEEN, HostMemory(1, 50 * GIB, 40 * GIB), HostMemory(2, 500 * GIB, 490 * GIB)]
    assert least_budget_bytes(seen, mem_fraction=0.5, ranks=1) == 15 * GIB
    assert least_budget_bytes([SEEN], mem_fraction=0.5, ranks=1) == 40 * GIB


def pools_of(others, **fields):
    """The pools of rank 0 of a world whose other ranks saw `others`."""

    class World(FakeGroup):
        def all_gather_object(self, value):
            return [value, *(list(memory) for memory in others)]

    group = World(1 + len(others))
    with (
        published_topology(tp_size=1 + len(others), ranks=ONE, max_running_requests=9, **fields),
        get_parallel().override(world_group=group),
    ):
        pools = make_kv_pools(
            KVSpec(1, 1, 8, torch.float32),
            TorchNativeBackend.kv_layout,
            context_len=128,
            device=torch.device("cpu"),
            available_before=4 * GIB,
            available_now=4 * GIB,
        )
    return pools, group


def test_all_ranks_of_a_world_get_pools_of_one_size_which_the_poorest_can_afford():
    """Planners must agree: a rank with more room would admit what its peers push back."""
    rich, group = pools_of([HostMemory(0, 8 * GIB, 8 * GIB)])
    assert group.calls["barrier"] == 1, "the slowest loader is waited for"
    poor, _ = pools_of([HostMemory(0, 4 * GIB, 1 << 16)])
    assert rich.allocator.size == 9 * 128 and poor.allocator.size == (1 << 14) // 2 // 64


def test_a_rank_without_room_fails_all_ranks_with_the_same_words():
    with pytest.raises(ValueError, match="the KV pool has no room for one page"):
        pools_of([HostMemory(0, 4 * GIB, 0)], max_total_tokens=64)


@pytest.mark.parametrize(("given", "replicas", "each"), [(9, 1, 9), (9, 2, 4), (2, 2, 1), (1, 2, 1)])
def test_attention_dp_replicas_share_the_running_requests(given, replicas, each):
    assert requests_per_replica(given, replicas) == each


def test_the_share_is_the_size_of_the_request_table_and_is_said(caplog):
    caplog.set_level("INFO")
    pools, _ = pools_of([HostMemory(0, 8 * GIB, 8 * GIB)], dp_size=2, enable_dp_attention=True)
    assert pools.req_to_token.size == 4 and pools.allocator.size == 4 * 128
    assert "max_running_requests=9 over 2 attention-DP replicas: each runs at most 4" in caplog.text


def pools_with(drafts, *, slots_per_step=1, page_size=1, available=1 << 22):
    """The pools of one rank whose memory is the limit, for a target of 64 bytes a token."""
    with published_topology(max_running_requests=9, page_size=page_size, ranks=ONE):
        return make_kv_pools(
            KVSpec(1, 1, 8, torch.float32),
            TorchNativeBackend.kv_layout,
            drafts=drafts,
            context_len=4000,
            slots_per_step=slots_per_step,
            device=torch.device("cpu"),
            available_before=available,
            available_now=available,
        )


@pytest.mark.parametrize("page_size", [1, 16])
def test_one_budget_holds_the_target_and_its_drafts_slot_by_slot(page_size):
    """A draft of three times the bytes leaves a quarter of the slots, and has as many itself."""
    alone = pools_with([], page_size=page_size)
    both = pools_with([KVSpec(3, 1, 8, torch.float32)], page_size=page_size)
    assert alone.allocator.size == 4 * both.allocator.size and alone.drafts == ()
    (draft,) = both.drafts
    assert draft.size == both.kv.size == both.allocator.size and draft.page_size == page_size
    assert draft.spec.num_layers == 3 and both.kv.spec.num_layers == 1
    assert both.req_to_token.size == alone.req_to_token.size


def test_the_table_has_room_for_a_round_at_the_end_of_the_context():
    assert pools_with([]).req_to_token.host.shape[1] == 4000
    assert pools_with([], slots_per_step=8).req_to_token.host.shape[1] == 4008

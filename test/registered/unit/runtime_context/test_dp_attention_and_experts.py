"""Modules born before their feature: exactly what works already, and a sentence for everything else."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers import dp_attention
from sglang.srt.layers.communicator import get_attn_tp_context
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.layers.exchange import dp_gather
from sglang.srt.layers.moe import utils as moe
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer
from sglang.srt.runtime_context import get_flags, get_forward, get_parallel, get_resources, reset_context
from sglang.srt.runtime_context.resources import DeepEPDispatchMode
from sglang.test.test_utils import published_topology


@pytest.mark.parametrize(
    "replicas, extend, tokens, mode",
    [
        (1, True, [3], "MAX_LEN"),
        (2, True, [4, 4], "SUM_LEN"),
        (2, False, [4, 4], "MAX_LEN"),
        (2, False, [4, 0], "MAX_LEN"),  # 2 * 4 <= 2 * 4
        (4, False, [4, 0, 0, 0], "SUM_LEN"),  # 4 * 4 > 2 * 4
        (4, False, [4, 4, 0, 0], "MAX_LEN"),
        (4, False, [4, 3, 0, 0], "SUM_LEN"),
    ],
)
def test_padding_follows_the_attention_width_alone(
    replicas: int, extend: bool, tokens: list[int], mode: str
) -> None:
    with get_parallel().override(attn_dp_size=replicas):
        found = DpPaddingMode.get_dp_padding_mode(is_extend_in_batch=extend, global_num_tokens=tokens)
    assert found is DpPaddingMode[mode]
    assert found.is_max_len() == (mode == "MAX_LEN")


@pytest.mark.parametrize("rank", range(8))
def test_the_topology_helper_and_a_spawn_bundle_agree(rank: int) -> None:
    fields = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2}
    with published_topology(**fields, ranks={"world_rank": rank}):
        p = get_parallel()
        told = dp_attention.compute_dp_attention_world_info(True, rank, 8, 2, 2)
        assert told == (p.attn_tp_rank, p.attn_tp_size, p.attn_dp_rank, p.attn_dp_size)
    assert dp_attention.compute_dp_attention_world_info(False, rank, 8, 2) == (rank, 8, 0, 1)


def _initialize() -> None:
    dp_attention.initialize_dp_attention(hidden_size=8, dtype=torch.float16, device=torch.device("cpu"))


def test_initialising_attention_dp_stamps_the_replica_of_a_process_without_a_bundle() -> None:
    with published_topology(tp_size=4, dp_size=2, enable_dp_attention=True):
        get_parallel().override_permanently(tp_rank=3)
        with (
            get_parallel().override(attn_tp_rank=1),
            pytest.raises(RuntimeError, match=r"initialize_dp_attention\(\) inside .*attn_tp_rank"),
        ):
            _initialize()
        assert get_parallel()._stamp == {"tp_rank": 3}
        _initialize()
        assert get_parallel().attn_dp_rank == 1
        assert get_parallel()._stamp == {"tp_rank": 3, "attn_dp_rank": 1}
        row = get_flags().dp
        assert (row.hidden_size, row.dtype, row.device) == (8, torch.float16, torch.device("cpu"))


def test_the_gather_slot_follows_the_list_that_is_gathered() -> None:
    with published_topology(tp_size=4, dp_size=2, enable_dp_attention=True, ranks={"world_rank": 3}):
        assert dp_attention.dp_gather_slot() == 1
        widths = dict(get_parallel()._config or {})
        dp_attention.update_dp_attention_post_scale(new_dp_size=4, new_dp_rank=3)
        get_parallel().override_permanently(ep_join_rank_offset=4)
        assert dp_attention.dp_gather_slot() == 7
        get_flags().dp.joiner_skip_all_gather = True
        assert dp_attention.dp_gather_slot() == 1
        assert get_parallel()._config == widths
        with pytest.raises(ValueError, match="rank 4, width 4"):
            dp_attention.update_dp_attention_post_scale(new_dp_size=4, new_dp_rank=4)


def test_gathering_is_the_identity_for_one_replica_and_needs_sizes_for_more() -> None:
    rows = torch.ones(2, 3)
    for move in (dp_gather.dp_gather, dp_gather.dp_scatter):
        with get_parallel().override(attn_dp_size=1):
            assert move(rows) is rows
        with (
            get_parallel().override(attn_dp_size=2),
            pytest.raises(RuntimeError, match="prepare_dp_forward"),
        ):
            move(rows)


def test_attention_inputs_live_for_one_forward() -> None:
    context = get_attn_tp_context()
    batch = SimpleNamespace()
    with context.maybe_input_scattered(batch):
        with pytest.raises(RuntimeError, match="set_attn_inputs"):
            context.fetch_qkv_latent()
        context.set_attn_inputs(SimpleNamespace(fetch_qkv_latent=lambda: 5))
        assert context.fetch_qkv_latent() == 5 and not context.input_scattered
    assert get_forward().attn_inputs is None


def _published_experts(**fields: Any) -> Any:
    context = published_topology(**fields)
    context.__enter__()
    moe.initialize_moe_config()
    return context


def test_expert_flags_come_from_the_published_configuration() -> None:
    context = _published_experts(
        moe_a2a_backend="deepep",
        moe_runner_backend="triton",
        deepep_mode="normal",
        enable_two_batch_overlap=True,
        enable_single_batch_overlap=True,
        tbo_token_distribution_threshold=0.25,
        disable_flashinfer_cutlass_moe_fp4_allgather=True,
    )
    assert moe.get_moe_a2a_backend().is_deepep() and moe.get_moe_runner_backend().is_triton()
    assert moe.is_tbo_enabled() and get_flags().moe.sbo_enabled
    flags = get_flags().moe
    assert (flags.deepep_mode, flags.deepep_config) == ("normal", "")
    assert (flags.tbo_token_distribution_threshold, flags.disable_fp4_allgather) == (0.25, True)
    context.__exit__(None, None, None)
    assert moe.get_moe_a2a_backend().is_none() and moe.get_moe_runner_backend().is_auto()
    assert not moe.is_tbo_enabled() and not get_flags().moe.sbo_enabled


def test_an_unknown_expert_kernel_is_refused_with_the_known_ones() -> None:
    with (
        published_topology(moe_runner_backend="cutlas"),
        pytest.raises(ValueError, match=r"--moe-runner-backend.*triton"),
    ):
        moe.initialize_moe_config()


@pytest.mark.parametrize("own", [True, False])
def test_a_draft_runs_on_its_own_expert_back_ends_or_on_the_targets(own: bool) -> None:
    drafts = {"speculative_moe_runner_backend": "auto", "speculative_moe_a2a_backend": "none"} if own else {}
    context = _published_experts(moe_a2a_backend="deepep", moe_runner_backend="triton", **drafts)
    with moe.speculative_moe_backend_context(), moe.speculative_moe_a2a_backend_context():
        assert moe.get_moe_runner_backend().is_auto() is own
        assert moe.get_moe_a2a_backend().is_none() is own
        assert get_flags().moe.disable_fp4_allgather and get_flags().moe.speculative_context
    assert moe.get_moe_runner_backend().is_triton() and moe.get_moe_a2a_backend().is_deepep()
    assert not get_flags().moe.speculative_context
    context.__exit__(None, None, None)


def test_the_variable_reduce_scatter_needs_one_replica_per_rank() -> None:
    for tp_size, replicas, enabled, answer in [
        (4, 4, True, True), (4, 2, True, False), (1, 1, True, False), (4, 4, False, False),
    ]:  # fmt: skip
        with (
            get_flags().dp.override(enabled=enabled),
            get_parallel().override(tp_size=tp_size, attn_dp_size=replicas),
        ):
            assert moe.should_use_dp_reduce_scatterv() is answer
            assert moe.should_skip_post_experts_all_reduce(is_tp_path=True) is answer
            assert moe.should_skip_post_experts_all_reduce(is_tp_path=False) is False
    for flag in ("fuse_mlp_allreduce", "mlp_reduce_scatter"):
        with get_forward().scoped(**{flag: True}):
            assert moe.should_skip_mlp_all_reduce()
            assert moe.should_skip_post_experts_all_reduce(is_tp_path=False)


def test_the_dispatch_buffer_is_cleaned_once_on_the_way_to_low_latency() -> None:
    cleaned: list[tuple[int, ...]] = []
    buffer = SimpleNamespace(
        low_latency_mode=True, clean_low_latency_buffer=lambda *sizes: cleaned.append(sizes)
    )
    state = get_resources().deepep
    DeepEPBuffer.set_dispatch_mode_as_normal()
    DeepEPBuffer.set_dispatch_mode_as_low_latency()  # no buffer yet: nothing to clean
    state.buffer, state.num_max_dispatch_tokens_per_rank, state.hidden_size, state.num_experts = (
        buffer,
        4,
        8,
        16,
    )
    DeepEPBuffer.set_dispatch_mode_as_normal()
    DeepEPBuffer.set_dispatch_mode_as_low_latency()
    DeepEPBuffer.set_dispatch_mode_as_low_latency()
    assert cleaned == [(4, 8, 16)] and state.dispatch_mode is DeepEPDispatchMode.LOW_LATENCY
    buffer.low_latency_mode = False
    DeepEPBuffer.set_dispatch_mode_as_normal()
    with pytest.raises(RuntimeError, match="low_latency_mode"):
        DeepEPBuffer.set_dispatch_mode_as_low_latency()
    with pytest.raises(NotImplementedError, match="expert parallelism"):
        DeepEPBuffer.get_deepep_buffer()
    reset_context()
    assert DeepEPBuffer._state().buffer is None


def test_what_is_not_built_yet_says_what_it_waits_for() -> None:
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    recorder = get_global_expert_distribution_recorder()
    for ask in (recorder.start_record, recorder.dump_record):
        with pytest.raises(NotImplementedError, match="expert load balancing"):
            ask()

"""Which expert back ends are active, and which collectives expert layers may leave out.

Read by expert layers and draft workers, which come later. Must not keep a copy of `get_flags().moe`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.arg_groups.fields.choices import MOE_A2A_BACKENDS
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import get_exec, get_flags, get_forward, get_parallel

__all__ = [
    "MoeA2ABackend",
    "MoeRunnerBackend",
    "get_moe_a2a_backend",
    "get_moe_runner_backend",
    "initialize_moe_config",
    "is_tbo_enabled",
    "should_skip_mlp_all_reduce",
    "should_skip_post_experts_all_reduce",
    "should_use_dp_reduce_scatterv",
    "speculative_moe_a2a_backend_context",
    "speculative_moe_backend_context",
]


class MoeA2ABackend(enum.Enum):
    """Transport of tokens to their experts and back."""

    NONE = "none"
    DEEPEP = "deepep"
    MOONCAKE = "mooncake"
    NIXL = "nixl"
    MORI = "mori"
    ASCEND_FUSEEP = "ascend_fuseep"
    FLASHINFER = "flashinfer"
    MEGAMOE = "megamoe"
    DEEPEP_V2 = "deepep_v2"
    ASCEND_TP = "ascend_tp"
    PPLX = "pplx"
    FLASHINFER_MEGAMOE = "flashinfer_megamoe"

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE

    def is_deepep(self) -> bool:
        return self is MoeA2ABackend.DEEPEP


if tuple(backend.value for backend in MoeA2ABackend) != MOE_A2A_BACKENDS:
    raise AssertionError(
        "MoeA2ABackend and choices.MOE_A2A_BACKENDS must name the same back ends in the same order"
    )


class MoeRunnerBackend(enum.Enum):
    """Kernels of the experts; AUTO leaves the choice to the layer."""

    AUTO = "auto"
    NATIVE = "native"
    CPU = "cpu"
    TRITON = "triton"

    def is_auto(self) -> bool:
        return self is MoeRunnerBackend.AUTO

    def is_triton(self) -> bool:
        return self is MoeRunnerBackend.TRITON


def initialize_moe_config() -> None:
    """Fill `get_flags().moe` from the published configuration."""
    moe, flags = get_exec().moe, get_flags().moe
    flags.a2a_backend = MoeA2ABackend(moe.moe_a2a_backend)
    flags.runner_backend = _runner(moe.moe_runner_backend, "--moe-runner-backend")
    # A draft without its own choice runs on the target's.
    flags.speculative_a2a_backend = (
        flags.a2a_backend
        if moe.speculative_moe_a2a_backend is None
        else MoeA2ABackend(moe.speculative_moe_a2a_backend)
    )
    flags.speculative_runner_backend = (
        flags.runner_backend
        if moe.speculative_moe_runner_backend is None
        else _runner(moe.speculative_moe_runner_backend, "--speculative-moe-runner-backend")
    )
    flags.deepep_mode = moe.deepep_mode
    flags.deepep_config = moe.deepep_config or ""
    flags.tbo_enabled = get_exec().overlap.enable_two_batch_overlap
    flags.sbo_enabled = moe.enable_single_batch_overlap
    flags.tbo_token_distribution_threshold = moe.tbo_token_distribution_threshold
    flags.disable_fp4_allgather = moe.disable_flashinfer_cutlass_moe_fp4_allgather


def _runner(name: str, flag: str) -> MoeRunnerBackend:
    try:
        return MoeRunnerBackend(name)
    except ValueError as error:
        known = ", ".join(backend.value for backend in MoeRunnerBackend)
        raise ValueError(f"{flag} {name!r} is not known; use one of {known}") from error


def get_moe_a2a_backend() -> MoeA2ABackend:
    """The transport in force; NONE before one is configured."""
    backend: MoeA2ABackend | None = get_flags().moe.a2a_backend
    return MoeA2ABackend.NONE if backend is None else backend


def get_moe_runner_backend() -> MoeRunnerBackend:
    """The kernels in force; AUTO before some are configured."""
    backend: MoeRunnerBackend | None = get_flags().moe.runner_backend
    return MoeRunnerBackend.AUTO if backend is None else backend


def is_tbo_enabled() -> bool:
    """Whether two halves of a batch overlap."""
    return get_flags().moe.tbo_enabled


@contextmanager
def speculative_moe_backend_context() -> Iterator[None]:
    """The draft's expert kernels for a block; drafts are not quantized, so they do not gather in fp4."""
    moe = get_flags().moe
    drafted = moe.speculative_runner_backend
    runner = get_moe_runner_backend() if drafted is None else drafted
    with moe.override(runner_backend=runner, disable_fp4_allgather=True, speculative_context=True):
        yield


@contextmanager
def speculative_moe_a2a_backend_context() -> Iterator[None]:
    """The draft's expert transport for a block."""
    moe = get_flags().moe
    drafted = moe.speculative_a2a_backend
    transport = get_moe_a2a_backend() if drafted is None else drafted
    with moe.override(a2a_backend=transport, disable_fp4_allgather=True, speculative_context=True):
        yield


def should_skip_mlp_all_reduce() -> bool:
    """Whether the decoder sums later, in its next norm or by a reduce-scatter."""
    forward = get_forward()
    return forward.fuse_mlp_allreduce or forward.mlp_reduce_scatter


def should_skip_post_experts_all_reduce(*, is_tp_path: bool) -> bool:
    """The same for expert layers; on the tensor path a reduce-scatter over the replicas sums as well."""
    return should_skip_mlp_all_reduce() or (is_tp_path and should_use_dp_reduce_scatterv())


def should_use_dp_reduce_scatterv() -> bool:
    """Whether one reduce-scatter stands for all-reduce and scatter.

    Only when every rank is a replica of its own: the list of row counts then has an entry for each rank.
    """
    if not is_dp_attention_enabled():
        return False
    parallel = get_parallel()
    return parallel.attn_dp_size == parallel.tp_size > 1

"""Owns the questions whose answer takes more than one published leaf.

Read by whoever would otherwise combine leaves itself. The rules are in ``arg_groups/predicates.py`` and are
the ones resolution uses; must not restate one, only fetch its inputs from the namespaces.
"""

from __future__ import annotations

from sglang.srt.arg_groups import predicates
from sglang.srt.arg_groups.prefill_buffer_ceiling import apply_prefill_buffer_ceiling
from sglang.srt.runtime_context.context import (
    get_context,
    get_disagg,
    get_exec,
    get_model,
    get_parallel,
    get_schedule,
    get_server_args,
    get_spec,
)

__all__ = [
    "attention_backends",
    "max_prefill_buffer_tokens",
    "max_speculative_num_draft_tokens",
    "pre_capture_activation_reserve_mb",
    "remote_instance_transfer_engine_enabled",
]


def attention_backends() -> tuple[str | None, str | None]:
    """(prefill, decode) kernels."""
    kernel = get_exec().kernel
    return predicates.attention_backend_pair(
        kernel.attention_backend, kernel.prefill_attention_backend, kernel.decode_attention_backend
    )


def max_prefill_buffer_tokens() -> int:
    """Rows that buffers of a prefill forward need; a registered provider has the last word."""
    schedule = get_schedule()
    default = predicates.prefill_token_ceiling(
        chunked_prefill_size=schedule.chunked_prefill_size,
        max_prefill_tokens=schedule.max_prefill_tokens,
        enable_dynamic_chunking=schedule.enable_dynamic_chunking,
        pp_size=get_parallel().pp_size,
    )
    return apply_prefill_buffer_ceiling(get_server_args(), default)


def max_speculative_num_draft_tokens() -> int | None:
    """Most tokens a verify round may hold; None when drafts are not configured.

    The bound that publish recorded, or the count in force where a later override raised it: buffers have to
    hold both.
    """
    publication = get_context().publication
    if publication is None:
        raise ValueError("config namespace 'spec' not published: the draft bound is fixed by publish()")
    now = publication.bags["spec"].values().get("speculative_num_draft_tokens")
    return max((bound for bound in (publication.draft_bound, now) if bound is not None), default=None)


def remote_instance_transfer_engine_enabled(override: str | None = None) -> bool:
    """Whether weights travel through the transfer engine; ``override`` is the load format of one load."""
    model = get_model()
    return predicates.uses_transfer_engine(
        load_format=model.load_format,
        backend=model.remote_instance_weight_loader_backend,
        modelexpress_config=model.modelexpress_config,
        start_seed=model.remote_instance_weight_loader_start_seed_via_transfer_engine,
        override=override,
    )


def pre_capture_activation_reserve_mb(gpu_mem_mb: float | None) -> int:
    """Device memory to keep free for activations before graphs are captured; 0 without a device."""
    graph = get_exec().graph.cuda_graph_config
    return predicates.activation_reserve_mb(
        gpu_mem_mb,
        disaggregation_mode=get_disagg().disaggregation_mode,
        prefill_tokens=max_prefill_buffer_tokens(),
        max_running_requests=get_schedule().max_running_requests,
        captured_decode_bs=None if graph is None else graph.decode.max_bs,
        num_draft_tokens=get_spec().speculative_num_draft_tokens,
    )

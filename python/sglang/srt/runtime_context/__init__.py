"""The one answer to every configuration and placement question of a process; this file only re-exports.

Read everywhere above floor 1. Must not hold code: modules of this folder import each other directly.
"""

from sglang.srt.runtime_context.bags import Bag
from sglang.srt.runtime_context.context import (
    RuntimeContext,
    get_context,
    get_device,
    get_disagg,
    get_exec,
    get_flags,
    get_forward,
    get_lora,
    get_memory,
    get_mm,
    get_model,
    get_observability,
    get_parallel,
    get_resources,
    get_schedule,
    get_server_args,
    get_serving,
    get_spec,
)
from sglang.srt.runtime_context.flags import FlagGroupBase as _FlagGroupBase
from sglang.srt.runtime_context.flags import Flags
from sglang.srt.runtime_context.forward import ForwardFlags
from sglang.srt.runtime_context.identities import validate_parallel as _validate_parallel
from sglang.srt.runtime_context.parallel import ParallelContext
from sglang.srt.runtime_context.parallel import derived_widths as _derived_widths
from sglang.srt.runtime_context.parallel import parallel_config_leaves as _parallel_config_leaves
from sglang.srt.runtime_context.parallel import parallel_fields as _parallel_fields
from sglang.srt.runtime_context.parallel_names import LIVE_READS as _LIVE_READS
from sglang.srt.runtime_context.predicates import (
    attention_backends,
    max_prefill_buffer_tokens,
    max_speculative_num_draft_tokens,
    pre_capture_activation_reserve_mb,
    remote_instance_transfer_engine_enabled,
)
from sglang.srt.runtime_context.publication import OverrideEntry, SpawnRanks
from sglang.srt.runtime_context.publish import (
    assert_published,
    assert_role,
    publish,
    publish_role,
    reset_context,
)
from sglang.srt.runtime_context.resources import Resources
from sglang.srt.runtime_context.widths import derive_parallel_widths

__all__ = [
    "Bag",
    "Flags",
    "ForwardFlags",
    "OverrideEntry",
    "ParallelContext",
    "Resources",
    "RuntimeContext",
    "SpawnRanks",
    "_FlagGroupBase",
    "_LIVE_READS",
    "_derived_widths",
    "_parallel_config_leaves",
    "_parallel_fields",
    "_validate_parallel",
    "assert_published",
    "assert_role",
    "attention_backends",
    "derive_parallel_widths",
    "get_context",
    "get_device",
    "get_disagg",
    "get_exec",
    "get_flags",
    "get_forward",
    "get_lora",
    "get_memory",
    "get_mm",
    "get_model",
    "get_observability",
    "get_parallel",
    "get_resources",
    "get_schedule",
    "get_server_args",
    "get_serving",
    "get_spec",
    "max_prefill_buffer_tokens",
    "max_speculative_num_draft_tokens",
    "pre_capture_activation_reserve_mb",
    "publish",
    "publish_role",
    "remote_instance_transfer_engine_enabled",
    "reset_context",
]

"""Rules that are asked both before publish (over a record) and after it (over the bags).

Read by ``overrides`` (``*_of``), by the derived declarations and by ``runtime_context/predicates.py``.
Plain values in, plain values out: must not take a record, a bag or a view, or both tiers could differ.
"""

import json
from math import lcm
from typing import Any

from sglang.srt.constants import LINEAR_ATTENTION_CHUNK

TRANSFER_ENGINE = "transfer_engine"

#: Rough device memory that one token of a forward occupies before graphs are captured, in MiB:
#: about sixteen bf16 activations of width 4096. To be replaced by a measured figure with the GPU path.
_ACTIVATION_MB_PER_TOKEN = 0.125
#: The reserve never takes more than this share of the device.
_ACTIVATION_SHARE = 0.125
#: Decode rows assumed where neither a limit nor a captured batch size is known.
_DECODE_ROWS = 256


def attn_dp_size(enable_dp_attention: bool, dp_size: int) -> int:
    """Attention replicas inside one tensor group."""
    return dp_size if enable_dp_attention else 1


def num_worlds(enable_dp_attention: bool, dp_size: int) -> int:
    """Worlds of ranks, each with the whole model; they share nothing but the server."""
    return dp_size // attn_dp_size(enable_dp_attention, dp_size)


def mamba_extra_buffer(*, disable_radix_cache: bool, mamba_radix_cache_strategy: str) -> bool:
    """A second state slot only makes sense while prefixes are cached at all."""
    return not disable_radix_cache and mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")


def mamba_extra_buffer_lazy(*, disable_radix_cache: bool, mamba_radix_cache_strategy: str) -> bool:
    return not disable_radix_cache and mamba_radix_cache_strategy == "extra_buffer_lazy"


def mamba_chunk_size(page_size: int | None) -> int:
    """Tokens between two cacheable states: an edge of the scan's block and of a cache page at once."""
    return lcm(LINEAR_ATTENTION_CHUNK, page_size or 1)


def attention_backend_pair(
    common: str | None, prefill: str | None, decode: str | None
) -> tuple[str | None, str | None]:
    """(prefill, decode): each phase's own choice, else the common one."""
    return prefill or common, decode or common


def prefill_token_ceiling(
    *, chunked_prefill_size: int | None, max_prefill_tokens: int, enable_dynamic_chunking: bool, pp_size: int
) -> int:
    """Most tokens one prefill forward may hold, so how large its buffers are.

    A chunk bounds a forward; without chunks the prefill budget does. Dynamic chunking over pipeline stages
    may grow a chunk up to the budget, so then the larger of the two counts.
    """
    chunk = chunked_prefill_size if chunked_prefill_size is not None and chunked_prefill_size > 0 else 0
    if not chunk:
        return max_prefill_tokens
    if enable_dynamic_chunking and pp_size > 1:
        return max(chunk, max_prefill_tokens)
    return chunk


def _modelexpress_transport(config: str | None) -> str | None:
    if not config:
        return None
    try:
        parsed: Any = json.loads(config)
    except ValueError as error:
        raise ValueError(f"--modelexpress-config is not JSON: {error}") from error
    transport = parsed.get("transport") if isinstance(parsed, dict) else None
    return transport if isinstance(transport, str) else None


def uses_transfer_engine(
    *,
    load_format: str,
    backend: str,
    modelexpress_config: str | None,
    start_seed: bool,
    override: str | None = None,
) -> bool:
    """Whether weights come in, or are offered, through the transfer engine.

    ``override`` states the load format of one load (a draft's, a reload's) in place of the configured one.
    """
    if start_seed:
        return True
    if (override or load_format) != "remote_instance":
        return False
    if backend == TRANSFER_ENGINE:
        return True
    return backend == "modelexpress" and _modelexpress_transport(modelexpress_config) == TRANSFER_ENGINE


def activation_reserve_mb(
    gpu_mem_mb: float | None,
    *,
    disaggregation_mode: str,
    prefill_tokens: int,
    max_running_requests: int | None,
    captured_decode_bs: int | None,
    num_draft_tokens: int | None,
) -> int:
    """Device memory, in MiB, to keep free for activations before graphs are captured; 0 without a device.

    The widest forward decides: a prefill piece, or on a decode-only server the rows times drafted tokens.
    """
    if gpu_mem_mb is None:
        return 0
    if disaggregation_mode == "decode":
        rows = max_running_requests or captured_decode_bs or _DECODE_ROWS
        tokens = rows * (num_draft_tokens or 1)
    else:
        tokens = prefill_tokens
    return int(min(tokens * _ACTIVATION_MB_PER_TOKEN, gpu_mem_mb * _ACTIVATION_SHARE))


def max_draft_tokens(num_draft_tokens: int | None, candidate_steps: tuple[int, ...]) -> int | None:
    """Most tokens a verify round may ever hold; None without a configured number.

    A chain of the deepest candidate has one node more than it has steps: its root.
    """
    if num_draft_tokens is None:
        return None
    return max(num_draft_tokens, max(candidate_steps, default=-1) + 1)

"""Owns the questions whose answer takes more than one published leaf.

Read by whoever would otherwise combine leaves itself. The rules are those of `arg_groups/overrides.py`, asked
of what is published; must not restate one.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import overrides
from sglang.srt.runtime_context.bags import PARALLEL, namespace_of
from sglang.srt.runtime_context.context import get_context, get_parallel, get_server_args

__all__ = [
    "attention_backends",
    "max_prefill_buffer_tokens",
    "max_speculative_num_draft_tokens",
    "pre_capture_activation_reserve_mb",
    "remote_instance_transfer_engine_enabled",
]


class _PublishedView(overrides.ResolvedView):
    """Every published leaf under its bare name, as the namespaces answer it now."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        home = namespace_of(name)
        if home is None:
            raise AttributeError(f"no published leaf is called '{name}'")
        if home == PARALLEL:
            return getattr(get_parallel(), name)
        top, _, part = home.partition(".")
        namespace = get_context().namespace(top)
        return getattr(getattr(namespace, part) if part else namespace, name)

    @property
    def _record(self) -> object:
        return get_server_args()


_PUBLISHED = _PublishedView()


def attention_backends() -> tuple[str | None, str | None]:
    """(prefill, decode) kernels."""
    return overrides.attention_backends_of(_PUBLISHED)


def max_prefill_buffer_tokens() -> int:
    """Most tokens one prefill forward may hold, so how large its buffers are."""
    return overrides.max_prefill_buffer_tokens(_PUBLISHED)


def max_speculative_num_draft_tokens() -> int | None:
    """Most tokens a verify round may hold; None when drafts are not configured.

    The bound that publish recorded, or the count in force where a later override raised it: buffers have to
    hold both.
    """
    publication = get_context().publication
    if publication is None:
        raise ValueError("config namespace 'spec' not published: the draft bound is fixed by publish()")
    now = getattr(publication.bags["spec"], "speculative_num_draft_tokens", None)
    return max((bound for bound in (publication.draft_bound, now) if bound is not None), default=None)


def remote_instance_transfer_engine_enabled(override: str | None = None) -> bool:
    """Whether weights travel through the transfer engine; `override` is the load format of one load."""
    return overrides.remote_instance_transfer_engine_of(_PUBLISHED, override)


def pre_capture_activation_reserve_mb(gpu_mem_mb: float | None) -> int:
    """Device memory, in MiB, to keep free for activations before graphs are captured; 0 without a device."""
    return overrides.pre_capture_activation_reserve_mb_of(_PUBLISHED, gpu_mem_mb)

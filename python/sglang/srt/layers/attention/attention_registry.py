"""Owns the names of the attention back ends and which of them the flags choose.

Read by the model runner's set-up. The names are those that the command line serves; a difference is an error
at import, so a flag can never name a back end that is not there.
"""

from __future__ import annotations

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.cpu_backend import CpuBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.runtime_context import assert_role, attention_backends

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch_native": TorchNativeBackend,
    "cpu": CpuBackend,
}

_served = LEAVES["attention_backend"].arg.served
if not isinstance(_served, tuple) or set(_served) != set(ATTENTION_BACKENDS):
    raise ImportError(
        f"attention back ends {sorted(ATTENTION_BACKENDS)} are not what --attention-backend serves: {_served}"
    )


def published_attention_backend() -> type[AttentionBackend]:
    """The back end that the flags name; one serves both prefill and decode for now."""
    assert_role("scheduler")
    prefill, name = attention_backends()
    if prefill != name:
        raise ValueError(
            f"prefill_attention_backend is {prefill!r} and decode_attention_backend {name!r}: two "
            "back ends over one cache are not served yet; give both the same name"
        )
    if name is None:
        raise RuntimeError("attention_backend is not set: resolve the arguments first, or publish a name")
    if name not in ATTENTION_BACKENDS:
        raise ValueError(
            f"attention_backend: {name!r} is not served; choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    return ATTENTION_BACKENDS[name]

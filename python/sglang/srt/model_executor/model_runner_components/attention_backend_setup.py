"""Owns the choice of the attention back end from the published flags.

Called once by the model runner. One back end serves both prefill and decode for now; flags that ask for two
different ones are refused before a rank starts.
"""

from __future__ import annotations

from sglang.srt.runtime_context import attention_backends


def published_attention_backend() -> str:
    """The name in force."""
    prefill, decode = attention_backends()
    if prefill != decode:
        raise ValueError(
            f"prefill_attention_backend is {prefill!r} and decode_attention_backend {decode!r}: two "
            "back ends over one cache are not served yet; give both the same name"
        )
    if decode is None:
        raise RuntimeError("attention_backend is not set: resolve the arguments first, or publish a name")
    return decode

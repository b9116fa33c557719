"""Which collective sits between layers. Scattered attention inputs arrive with the parallel layouts.

Read by decoder layers. State lives in the context's forward flags; must not keep any of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_forward

__all__ = ["AttnTpContext", "get_attn_tp_context"]


class AttnTpContext:
    """Whether the rows that attention gets are scattered over its tensor group, and who fetches them."""

    @property
    def input_scattered(self) -> bool:
        return get_forward().attn_input_scattered

    def use_input_scattered(self, forward_batch: Any) -> bool:
        """Never yet: no layout scatters attention inputs before the parallel layouts arrive."""
        return False

    @contextmanager
    def maybe_input_scattered(self, forward_batch: Any) -> Iterator[None]:
        """The scope of one forward. What a layer left as attention input is dropped when it closes."""
        scattered = self.use_input_scattered(forward_batch)
        with get_forward().scoped(attn_input_scattered=scattered, attn_inputs=None):
            yield

    def set_attn_inputs(self, attn_inputs: Any) -> None:
        get_forward().set("attn_inputs", attn_inputs)

    def fetch_qkv_latent(self) -> Any:
        """The latent of the inputs that the layer left, computed by whoever left them."""
        attn_inputs = get_forward().attn_inputs
        if attn_inputs is None:
            raise RuntimeError("no attention inputs were left in this forward; call set_attn_inputs() first")
        return attn_inputs.fetch_qkv_latent()


_ATTN_TP_CONTEXT = AttnTpContext()


def get_attn_tp_context() -> AttnTpContext:
    return _ATTN_TP_CONTEXT

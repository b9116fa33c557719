"""One optional provider that may raise or lower the ceiling of prefill buffers.

Registered by a plug-in that pads prefill batches; asked by `max_prefill_buffer_tokens`, which computes the
default.
"""

from collections.abc import Callable
from typing import Any

#: (the record, the default ceiling) -> the ceiling to use.
CeilingProvider = Callable[[Any, int], int]

_prefill_buffer_ceiling_fn: CeilingProvider | None = None


def register_prefill_buffer_ceiling(provider: CeilingProvider) -> CeilingProvider:
    """Install the provider, also as a decorator; the same one again is fine, another one is refused."""
    global _prefill_buffer_ceiling_fn
    if _prefill_buffer_ceiling_fn is not None and _prefill_buffer_ceiling_fn is not provider:
        raise RuntimeError(
            f"a prefill buffer ceiling is already registered ({_prefill_buffer_ceiling_fn!r}); "
            f"only one may be in force, {provider!r} was refused"
        )
    _prefill_buffer_ceiling_fn = provider
    return provider


def apply_prefill_buffer_ceiling(record: object, default_ceiling: int) -> int:
    """What the provider makes of the default, or the default itself."""
    provider = _prefill_buffer_ceiling_fn
    return default_ceiling if provider is None else provider(record, default_ceiling)

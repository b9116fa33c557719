"""The value of ``--cuda-graph-config``: what is captured, per phase.

Read by graph setup and the activation reserve. Plain data; it decides nothing.
"""

import msgspec


class PhaseGraphConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One phase (decode or prefill); None means "not said here"."""

    backend: str | None = None
    max_bs: int | None = None
    bs: list[int] | None = None


class CudaGraphConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    decode: PhaseGraphConfig = PhaseGraphConfig()
    prefill: PhaseGraphConfig = PhaseGraphConfig()

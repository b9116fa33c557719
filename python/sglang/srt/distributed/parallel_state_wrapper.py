"""Owns ``ParallelState``: the placement of one runner, frozen at a moment, for reports made outside its
scope.

Built where a runner is built; read by the weight checker. Must not be used to decide anything in a forward:
code that runs asks the context in the scope that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sglang.srt.runtime_context import get_parallel

__all__ = ["ParallelState"]


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Widths and ranks of the runner it was made for."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    attn_dp_rank: int = 0
    attn_dp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    moe_ep_rank: int = 0
    moe_ep_size: int = 1
    moe_dp_rank: int = 0
    moe_dp_size: int = 1
    moe_tp_rank: int = 0
    moe_tp_size: int = 1

    @classmethod
    def trivial(cls, *, pp_rank: int = 0, pp_size: int = 1) -> ParallelState:
        """One rank in everything but, perhaps, the pipeline."""
        if not 0 <= pp_rank < pp_size:
            raise ValueError(f"0 <= pp_rank < pp_size does not hold: rank {pp_rank}, width {pp_size}")
        return cls(pp_rank=pp_rank, pp_size=pp_size)

    @classmethod
    def from_context(cls) -> ParallelState:
        """What the context answers now, in the scope this is called in."""
        parallel = get_parallel()
        return cls(**{field.name: getattr(parallel, field.name) for field in fields(cls)})

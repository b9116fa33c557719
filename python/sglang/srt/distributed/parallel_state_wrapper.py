"""Owns `ParallelState`: the placement in which a model runner was built.

Made and compared by the model runner; read by the weight checker, which reports outside the runner's scope.
Must not decide anything in a forward: code that runs asks the context, in the scope that is open then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.runtime_context import get_parallel

__all__ = ["ParallelState"]

#: Width and rank of every kind of parallelism that cuts a layer.
_CUTS = tuple(
    (f"{kind}_size", f"{kind}_rank")
    for kind in ("tp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_dp", "moe_tp")
)
_PIPELINE = (("pp_size", "pp_rank"),)


def _answers(names: Sequence[tuple[str, str]]) -> dict[str, int]:
    """What the context answers now. At width one the rank is 0, and no group is asked for it."""
    parallel = get_parallel()
    answers: dict[str, int] = {}
    for size, rank in names:
        width = answers[size] = getattr(parallel, size)
        answers[rank] = 0 if width == 1 else getattr(parallel, rank)
    return answers


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Widths and ranks of one runner."""

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
        """Width one in everything but the pipeline."""
        if not 0 <= pp_rank < pp_size:
            raise ValueError(f"0 <= pp_rank < pp_size does not hold: rank {pp_rank}, width {pp_size}")
        return cls(pp_rank=pp_rank, pp_size=pp_size)

    @classmethod
    def from_context(cls) -> ParallelState:
        """What the context answers now, in the scope that is open."""
        return cls(**_answers((*_CUTS, *_PIPELINE)))

    def check_in_force(self) -> None:
        """`RuntimeError` unless layers that were built in this placement may run in the one in force now.

        Layers keep rank and width from their construction and ask for a group when they run, so in another
        placement they would compute wrong numbers. The pipeline may differ: its scope is open while a draft
        is built and not while it runs. Groups are not compared: groups that were built again will do.
        """
        parallel = get_parallel()
        for size, rank in _CUTS:  # in each forward, so without a table where all is well
            width = getattr(self, size)
            if width != getattr(parallel, size) or (
                width > 1 and getattr(self, rank) != getattr(parallel, rank)
            ):
                break
        else:
            return
        now = _answers(_CUTS)
        changed = [name for name, value in now.items() if value != getattr(self, name)]
        built = ", ".join(f"{name} {getattr(self, name)}" for name in changed)
        found = ", ".join(f"{name} {now[name]}" for name in changed)
        raise RuntimeError(
            f"a model that was built at {built} cannot run at {found}: its layers hold their shares of "
            "the first. Run it in the scope in which its runner was built: a draft that owns its "
            "attention in draft_tp_context(owns_attention=True), any other model outside such a scope"
        )

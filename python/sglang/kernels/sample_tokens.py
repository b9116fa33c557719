"""Owns the choice of one token for each row of logits: the best one, or a draw from a seeded stream.

Read by the sampler. It must not know requests: it takes tensors and numbers. Compiled kernels answer where
they are there; the draw is defined, and else computed, by `draw_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from sglang.kernels.compiled_for import kernels_for
from sglang.kernels.draw_token import draw, uniforms

__all__ = ["best_tokens", "draw_tokens"]


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of the highest logit, and whether all are finite: two [rows] of logits [rows, vocab].

    The kernel reads the logits once; two operators of torch wake threads for it, which costs a step of one
    request half a millisecond. The id of a row that is not finite means nothing.
    """
    kernels = _kernels(logits)
    if kernels is None:
        return logits.argmax(dim=-1), torch.isfinite(logits.sum(dim=-1))
    ids, finite = kernels.argmax.argmax_rows(logits)
    return ids, finite


def draw_tokens(
    logits: torch.Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    """Draw from each row of logits [rows, vocab] as `draw` does with `uniforms(seed, position)`: [rows] ids.

    A row has a finite logit, and the others are finite or minus infinity.
    """
    kernels = _kernels(logits)
    if kernels is None:
        streams = [uniforms(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        picked = draw(
            logits,
            temperature=list(temperature),
            top_k=list(top_k),
            top_p=list(top_p),
            min_p=list(min_p),
            u=streams,
        )
        return torch.tensor(picked, device=logits.device)
    limits = torch.tensor(list(zip(temperature, top_k, top_p, min_p, strict=True)), dtype=torch.float64)
    ids: torch.Tensor = kernels.sampling.draw_tokens(
        logits, limits.view(-1, 4), _numbers([_signed(seed) for seed in seeds]), _numbers(positions)
    )
    return ids


def _kernels(logits: torch.Tensor) -> ModuleType | None:
    return kernels_for(logits) if logits.dtype == torch.float32 and logits.stride(-1) == 1 else None


def _numbers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _signed(seed: int) -> int:
    """The low 64 bits, as the kernels take them."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)

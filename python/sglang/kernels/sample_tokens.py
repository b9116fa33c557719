"""Owns the choice of one token for each row of logits: the best one, or a draw from a seeded stream.

Read by the sampler. It must not know requests: it takes tensors and numbers. Compiled kernels answer where
they are there; the draw is defined, and else computed, by `draw_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from sglang.kernels.compiled_for import kernels_for
from sglang.kernels.draw_token import draw, uniforms

__all__ = ["NOTHING_TO_DRAW", "NOT_FINITE", "RowDraw", "RowDraws", "best_tokens", "sample_rows"]

#: Why a row gave no token; 0 is a row that gave one.
NOT_FINITE, NOTHING_TO_DRAW = 1, 2


class RowDraw(NamedTuple):
    """How one row is drawn; with a `top_k` of 1 it is greedy, whatever the rest says."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class RowDraws:
    """How the rows of a batch are drawn, also as the tensors that the kernel reads.

    Made once for a batch: from step to step only the places in the streams are other ones.
    """

    def __init__(self, rows: Sequence[RowDraw]) -> None:
        self.rows = list(rows)
        self.greedy = [row.top_k == 1 for row in rows]
        self._limits = torch.tensor([row[:4] for row in rows], dtype=torch.float64).view(-1, 4)
        streams = np.zeros((2, len(rows)), dtype=np.int64)
        streams[0] = np.array([row.seed % (1 << 64) for row in rows], dtype=np.uint64).view(np.int64)
        self._positions = streams[1]
        self._streams = torch.from_numpy(streams)

    def sample(
        self,
        kernels: ModuleType,
        logits: torch.Tensor,
        positions: Sequence[int],
        places: Sequence[int] | None,
        *,
        is_masked: bool,
    ) -> torch.Tensor:
        """`sample_rows` by the compiled kernel."""
        self._positions[:] = positions
        sampled: torch.Tensor = kernels.sampling.sample_rows(
            logits,
            self._limits,
            self._streams,
            places=None if places is None else torch.tensor(places, dtype=torch.int64),
            is_masked=is_masked,
        )
        return sampled


def sample_rows(
    logits: torch.Tensor,
    draws: RowDraws,
    positions: Sequence[int],
    *,
    places: Sequence[int] | None = None,
    is_masked: bool = False,
) -> torch.Tensor:
    """A token of each row of float32 logits [.., vocab], which stay as they are: int64 [2, rows].

    The first are ids, the others failures. `places` are the rows of the logits that are meant, in the order
    of `draws`; None: all of them.

    A row is drawn as `draw` does it with `uniforms(seed, position)`, or gives the lowest id of its highest
    logit. With a logit that is not finite it has failure `NOT_FINITE`. Where rows are masked, minus infinity
    is none, and a row from which nothing can be drawn has `NOTHING_TO_DRAW`. The id of a failed row means
    nothing.

    Where all rows are greedy, nothing here waits for the device.
    """
    kernels = _kernels(logits)
    if kernels is not None:
        return draws.sample(kernels, logits, positions, places, is_masked=is_masked)
    if places is not None:
        logits = logits[torch.tensor(places, dtype=torch.int64, device=logits.device)]
    if is_masked:
        failures = torch.where(torch.isfinite(logits.amax(dim=-1)), 0, NOTHING_TO_DRAW)
    else:
        failures = torch.where(torch.isfinite(logits.sum(dim=-1)), 0, NOT_FINITE)
    ids = logits.argmax(dim=-1)
    drawn = [at for at, is_greedy in enumerate(draws.greedy) if not is_greedy]
    if drawn:
        some, params = logits[drawn], [draws.rows[at] for at in drawn]
        ids[drawn] = torch.tensor(
            draw(
                some.masked_fill_((failures[drawn] != 0)[:, None], 0.0),
                temperature=[p.temperature for p in params],
                top_k=[p.top_k for p in params],
                top_p=[p.top_p for p in params],
                min_p=[p.min_p for p in params],
                u=[uniforms(p.seed, positions[at]) for p, at in zip(params, drawn, strict=True)],
            ),
            device=logits.device,
        )
    return torch.stack((ids, failures))


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


def _kernels(logits: torch.Tensor) -> ModuleType | None:
    return kernels_for(logits) if logits.dtype == torch.float32 and logits.stride(-1) == 1 else None

"""Owns the step from logits to tokens and the mask of a grammar: the calls, and the reference of the mask.

Read by the sampler of the engine and by the tests. The reference of a draw is the engine's own definition,
`sglang.kernels.draw_token.draw_reference`, whose stream of random numbers is computed here too.
"""

from __future__ import annotations

import torch


def sample_rows(
    logits: torch.Tensor,
    limits: torch.Tensor,
    streams: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    is_masked: bool = False,
) -> torch.Tensor:
    """A token for each row of float32 logits [rows, vocab]: int64 [2, rows], ids and failures.

    places: int64, the rows of the logits that are meant, in this order; None: all of them.

    limits: float64 [rows, 4], temperature (above 0), top_k (0 or less: all), top_p, min_p; with a top_k of 1
    it is the lowest id of the highest logit. streams: int64 [2, rows], seeds of 64 bits and positions: a draw
    is a pure function of these and of the row.

    A row has failure 1 where a logit is not finite. Where rows are masked, minus infinity is no failure, and
    a row from which nothing can be drawn has failure 2. The id of a row that failed is 0.
    """
    out = torch.empty_like(streams)
    torch.ops.sgl_kernel.sample_rows(logits, places, limits, streams, is_masked, out)
    return out


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Takes tokens away from float32 logits [.., vocab], in place: minus infinity where the bit is 0.

    bitmask: int32 [masked rows, words]; the bit of token t is bit t % 32 of word t // 32. rows: int64 [masked
    rows], the row of the logits that each row of the bitmask is for.
    """
    torch.ops.sgl_kernel.apply_token_bitmask(logits, bitmask, rows)
    return logits


def apply_token_bitmask_reference(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The same without writing."""
    bits = (bitmask[:, :, None] >> torch.arange(32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] == 1
    masked = logits.clone()
    masked[rows] = logits[rows].where(allowed, -torch.inf)
    return masked


@torch.library.register_fake("sgl_kernel::sample_rows")
def _sample_rows_fake(
    logits: torch.Tensor,
    places: torch.Tensor | None,
    limits: torch.Tensor,
    streams: torch.Tensor,
    is_masked: bool,
    out: torch.Tensor,
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::apply_token_bitmask")
def _apply_token_bitmask_fake(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Only writes into `logits`."""

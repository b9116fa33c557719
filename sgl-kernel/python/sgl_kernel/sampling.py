"""Owns the draw of tokens from logits and the mask of a grammar: the calls, and the reference of the mask.

Read by the sampler of the engine and by the tests. The reference of a draw is the engine's own definition,
`sglang.kernels.draw_token.draw_reference`, whose stream of random numbers is computed here too.
"""

from __future__ import annotations

import torch


def draw_tokens(
    logits: torch.Tensor, limits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A token for each row of float32 logits [rows, vocab]: int64 [rows].

    limits: float64 [rows, 4], temperature (above 0), top_k (0 or less: all), top_p, min_p. seeds and
    positions: int64 [rows], a seed being 64 bits; the draw is a pure function of them and of the row. A row
    has a finite logit, and the others are finite or minus infinity.
    """
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    torch.ops.sgl_kernel.draw_tokens(logits, limits, seeds, positions, ids)
    return ids


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


@torch.library.register_fake("sgl_kernel::draw_tokens")
def _draw_tokens_fake(
    logits: torch.Tensor,
    limits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Only writes into `ids`."""


@torch.library.register_fake("sgl_kernel::apply_token_bitmask")
def _apply_token_bitmask_fake(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Only writes into `logits`."""

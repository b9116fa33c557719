"""Owns the greedy choice of rows of logits: the call, and its torch reference.

Read by the sampler and the tests, which hold the kernel to the reference.
"""

from __future__ import annotations

import torch


def argmax_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 x [rows, numbers]: ids int64 [rows] and bool [rows].

    The id is that of a row's highest number, the lowest where several are; the second says whether all
    numbers of the row are finite. Where they are not, the id is some number of the row.
    """
    ids = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    is_finite = torch.empty(x.shape[0], dtype=torch.bool, device=x.device)
    torch.ops.sgl_kernel.argmax_rows(x, ids, is_finite)
    return ids, is_finite


def argmax_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, in torch."""
    return x.argmax(dim=-1), x.isfinite().all(dim=-1)


@torch.library.register_fake("sgl_kernel::argmax_rows")
def _argmax_rows_fake(x: torch.Tensor, ids: torch.Tensor, is_finite: torch.Tensor) -> None:
    """Only writes into `ids` and `is_finite`."""

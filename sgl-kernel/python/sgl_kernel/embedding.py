"""Owns rows of an embedding table: from the table, or from the packed weight of a head that is tied to it.

Read by the vocabulary layers and the tests. A tied head is then the only place where the numbers lie.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.linear import BlockForm


def embed_rows(
    ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, first_id: int = 0, is_share: bool = False
) -> torch.Tensor:
    """Copies row `id - first_id` of the table for each id (int64 [rows]) into out [rows, hidden].

    An id that the table does not have is an error, or, where the table is a share of a longer one, gives a
    row of zeros.
    """
    torch.ops.sgl_kernel.embed_rows(ids, table, out, first_id, is_share)
    return out


def embed_panels(
    ids: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    count: int,
    first_id: int = 0,
    is_share: bool = False,
) -> torch.Tensor:
    """The same from what `pack_panels` made of a table [count, hidden]; out has its dtype."""
    torch.ops.sgl_kernel.embed_panels(ids, packed, out, count, first_id, is_share)
    return out


def embed_blocks(
    ids: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    form: BlockForm,
    count: int,
    first_id: int = 0,
    is_share: bool = False,
) -> torch.Tensor:
    """The same from what `pack_blocks` made of it; out is float32 or bfloat16."""
    torch.ops.sgl_kernel.embed_blocks(ids, packed, out, int(form), count, first_id, is_share)
    return out


def embed_rows_reference(
    ids: torch.Tensor, table: torch.Tensor, first_id: int = 0, is_share: bool = False
) -> torch.Tensor:
    """The same without writing."""
    local = ids - first_id
    foreign = (local < 0) | (local >= table.shape[0])
    if bool(foreign.any()) and not is_share:
        raise ValueError(f"ids {ids[foreign].tolist()} of a table of {table.shape[0]}")
    return F.embedding(local.masked_fill(foreign, 0), table).masked_fill(foreign[:, None], 0)


@torch.library.register_fake("sgl_kernel::embed_rows")
def _embed_rows_fake(
    ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, first_id: int, is_share: bool
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::embed_panels")
def _embed_panels_fake(
    ids: torch.Tensor, packed: torch.Tensor, out: torch.Tensor, count: int, first_id: int, is_share: bool
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::embed_blocks")
def _embed_blocks_fake(
    ids: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    form: int,
    count: int,
    first_id: int,
    is_share: bool,
) -> None:
    """Only writes into `out`."""

"""Owns the small operations between the products of a layer: the calls, and their torch references.

Read by callers of `sgl_kernel` and by the tests, which hold the kernels to the references.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rotary_cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Writes cosines and signed sines of `positions * frequencies`, as `rotate_heads` takes them.

    positions: int64 [rows], frequencies: float32 [dim / 2], cos and sin: [rows, 1, dim] or [rows, dim],
    float32 or bfloat16. The first half of a row of `sin` has the opposite sign.
    """
    torch.ops.sgl_kernel.rotary_cos_sin(positions, frequencies, cos, sin)


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the heads [rows, heads, dim] in place, dimension i with i + dim / 2; rows may be strided."""
    torch.ops.sgl_kernel.rotate_heads(x, cos, sin)
    return x


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of x [rows, gate | up] into out [rows, size]; float32 or bfloat16."""
    torch.ops.sgl_kernel.silu_and_mul(x, out)
    return out


def rotary_cos_sin_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [rows, dim]: the angle is rounded to float32, its cosine once more."""
    angles = torch.outer(positions.float(), frequencies).double()
    cos, sin = angles.cos().float().to(dtype), angles.sin().float().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_heads_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same without writing, in float32."""
    swapped = x.float().roll(x.shape[-1] // 2, dims=-1)
    rows, _, dim = x.shape
    return (x.float() * cos.view(rows, 1, dim) + swapped * sin.view(rows, 1, dim)).to(x.dtype)


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The same, in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@torch.library.register_fake("sgl_kernel::rotary_cos_sin")
def _rotary_cos_sin_fake(
    positions: torch.Tensor, frequencies: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Only writes into `cos` and `sin`."""


@torch.library.register_fake("sgl_kernel::rotate_heads")
def _rotate_heads_fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Only writes into `x`."""


@torch.library.register_fake("sgl_kernel::silu_and_mul")
def _silu_and_mul_fake(x: torch.Tensor, out: torch.Tensor) -> None:
    """Only writes into `out`."""

"""Owns linear layers over int8 weights in plain torch: the definition, and what runs without the kernels.

Read by the linear method of int8 weights. Weights have one scale an output, rows of x one scale each. Sums
are whole numbers and exact, so the compiled kernel, which is faster, gives the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Inputs whose products of -128 with 127 a float32 sum holds exactly, in any order: 1024 * 128 * 127 < 2^24.
_EXACT_INPUTS = 1024
#: Most inputs of a weight: a sum fits 32 bits, as the compiled kernel has it.
MOST_INPUTS = 131072
#: A row whose largest size is below this counts as zeros.
_SMALLEST = 2.0**-100


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] as whole float32 numbers, -127 .. 127, and float32 scales [rows, 1].

    The scale is the row's largest size / 127, and halves are rounded to even. A row of zeros has the scale 0,
    a row with a number that is not finite has the scale NaN.
    """
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True) if x.shape[1] else wide.new_zeros(len(wide), 1)
    is_finite = most.isfinite()
    is_used = is_finite & (most >= _SMALLEST)
    # Not `127.0 / most`, which torch computes as a reciprocal times 127, rounded twice.
    inverse = torch.full_like(most, 127.0) / most
    numbers = (wide * inverse).round().where(is_used, 0.0)
    scales = (most / 127.0).where(is_used, 0.0).where(is_finite, torch.nan)
    return numbers, scales


def linear_int8(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [rows, in] times a weight of numbers int8 [out, in] and scales float32 [out], plus bias: [rows, out].

    A value is `float32(sum) * (scale of the row * scale of the output) + bias` in float32, then in `dtype`,
    or in x's type.
    """
    rows, row_scales = quantized_rows(x)
    sums = torch.zeros(len(rows), len(numbers), dtype=torch.float64, device=x.device)
    for first in range(0, x.shape[1], _EXACT_INPUTS):
        part = slice(first, first + _EXACT_INPUTS)
        sums += F.linear(rows[:, part], numbers[:, part].float())
    out = sums.float() * (row_scales * scales)
    return (out if bias is None else out + bias.float()).to(dtype or x.dtype)

"""Owns linear layers over int8 weights: how they are packed, the call, and the torch reference.

Read by whoever stores weights for a CPU, and by the tests. A weight has one scale an output, x is quantized
to int8 with one scale a row on the way. Sums are exact: every instruction set and the reference give the same
bits.
"""

from __future__ import annotations

import torch

from sgl_kernel.linear import PANEL, with_whole_rows

#: Inputs that lie together.
FOUR = 4
#: Most inputs whose products a sum of 32 bits holds.
MOST_INPUTS = 131072
#: A row whose largest size is below this counts as zeros.
SMALLEST = 2.0**-100


def pack_int8(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """numbers int8 [outputs, in], scales float32 [outputs]: uint8 [panels, bytes of a panel].

    Of 32 outputs the scales, -128 times the sums of the numbers (int32), and the numbers in fours of inputs,
    those of all outputs side by side. What is missing of the last panel, and of the last four, is zeros.
    """
    outputs, inputs = numbers.shape
    if numbers.dtype != torch.int8 or scales.dtype != torch.float32 or scales.shape != (outputs,):
        raise ValueError(
            f"numbers are int8 [outputs, in] and scales float32 [outputs], got {numbers.dtype} "
            f"{tuple(numbers.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )
    if inputs > MOST_INPUTS:
        raise ValueError(f"a sum holds {MOST_INPUTS} inputs at most, and the weight has {inputs}")
    size = PANEL * (8 + -(-inputs // FOUR) * FOUR)
    out = torch.empty(-(-outputs // PANEL), size, dtype=torch.uint8)
    torch.ops.sgl_kernel.pack_int8(with_whole_rows(numbers), scales.contiguous(), out)
    return out


def pack_int8_reference(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `pack_int8` writes."""
    outputs, inputs = numbers.shape
    panels, fours = -(-outputs // PANEL), -(-inputs // FOUR)
    whole = numbers.new_zeros(panels * PANEL, fours * FOUR)
    whole[:outputs, :inputs] = numbers
    head = torch.zeros(2, panels * PANEL, dtype=torch.int32)
    head[0, :outputs] = scales.view(torch.int32)
    head[1] = whole.sum(dim=1, dtype=torch.int32) * -128
    lines = whole.view(panels, PANEL, fours, FOUR).transpose(1, 2).reshape(panels, -1)
    heads = head.view(2, panels, PANEL).transpose(0, 1).reshape(panels, -1)
    return torch.cat([heads.view(torch.uint8), lines.view(torch.uint8)], dim=1)


def unpack_int8(packed: torch.Tensor, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and scales that `pack_int8` took."""
    panels, head = packed.shape[0], PANEL * 8
    lines = packed[:, head:].view(torch.int8).reshape(panels, -1, PANEL, FOUR)
    numbers = lines.transpose(1, 2).reshape(panels * PANEL, -1)
    scales = packed[:, : head // 2].contiguous().view(torch.float32)
    return numbers[:outputs, :inputs].contiguous(), scales.reshape(-1)[:outputs].clone()


def linear_int8(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out[r, n] = sum of q[r, k] * numbers[n, k] * (scale of r * scale of n) + bias[n].

    x [rows, in] and out [rows, outputs] are float32 or bfloat16; q is x over its row's scale, the largest
    size of the row / 127, rounded to whole numbers (ties to even). A row with a number that is not finite
    gives NaN.
    """
    torch.ops.sgl_kernel.linear_int8(x, packed, bias, out)
    return out


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] as whole numbers in float64, -127 .. 127, and float32 scales [rows, 1]."""
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True) if x.shape[1] else wide.new_zeros(len(wide), 1)
    is_used = most.isfinite() & (most >= SMALLEST)
    # Not `127.0 / most`, which torch computes as a reciprocal times 127, rounded twice.
    inverse = torch.where(is_used, torch.full_like(most, 127.0) / most, 0.0)
    numbers = torch.where(is_used, wide * inverse, 0.0).round().double()
    scales = torch.where(is_used, most / 127.0, torch.where(most.isfinite(), 0.0, torch.nan))
    return numbers, scales


def linear_int8_reference(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What `linear_int8` computes from the numbers and scales before packing; sums are exact in float64."""
    rows, row_scales = quantized_rows(x)
    out = (rows @ numbers.double().T).float() * (row_scales * scales)
    return (out if bias is None else out + bias.float()).to(x.dtype)


@torch.library.register_fake("sgl_kernel::linear_int8")
def _linear_int8_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::pack_int8")
def _pack_int8_fake(numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Only writes into `out`."""

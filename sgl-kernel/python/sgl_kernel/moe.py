"""Owns the feed-forward of a mixture of experts: how experts are packed, the call, and the torch reference.

Read by whoever stores experts for a CPU, and by the tests. Each expert's weights are packed as those of a
linear layer are, and multiplied by the same kernels. It must not choose experts: a router's choice comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_kernel.elementwise import silu_and_mul_reference
from sgl_kernel.linear import pack_panels
from sgl_kernel.linear_int8 import pack_int8


@dataclass(frozen=True)
class PackedExperts:
    """Packed weights of all experts, one behind another along the first dimension of both tensors.

    gate_up of each was [2 * intermediate_size, in], gate before up, and down [out, intermediate_size].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    intermediate_size: int


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """gate_up [experts, 2 * intermediate, in] and down [experts, out, intermediate], float32 or bfloat16."""
    return PackedExperts(_stacked(pack_panels, gate_up), _stacked(pack_panels, down), down.shape[2])


def pack_experts_int8(
    gate_up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor]
) -> PackedExperts:
    """Int8 weights of these shapes, each with its scales, float32 [experts, outputs]."""
    return PackedExperts(_stacked(pack_int8, *gate_up), _stacked(pack_int8, *down), down[0].shape[2])


def _stacked(pack: Callable[..., torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
    """Of each expert what `pack` makes of its weights, without a second copy of more than one expert."""
    out: torch.Tensor | None = None
    for expert in range(len(weights[0])):
        packed = pack(*(weight[expert] for weight in weights))
        if out is None:
            out = packed.new_empty(len(weights[0]), *packed.shape)
        out[expert] = packed
    if out is None:
        raise ValueError("a mixture has one expert at least, and these weights have none")
    return out


def fused_experts(
    x: torch.Tensor,
    experts: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[r] = the sum over k of topk_weights[r, k] * y[r, k].

    y[r, k] = down(silu(gate(x[r])) * up(x[r])) of expert topk_ids[r, k]; -1 is left out, so that a rank may
    hold a part of the experts. x: [rows, in], float32 or bfloat16. topk_weights: float32 [rows, k]. topk_ids:
    int64 [rows, k]. out: [rows, out], of the dtype of x. Sums are float32, in the order of `topk_ids`: what a
    row gives does not depend on the other rows.
    """
    torch.ops.sgl_kernel.fused_experts(
        x, experts.gate_up, experts.down, experts.intermediate_size, topk_weights, topk_ids, out
    )
    return out


#: Rows [rows, in] of an expert, times its weight: float32 [rows, outputs].
Multiply = Callable[[int, torch.Tensor], torch.Tensor]


def fused_experts_reference(
    x: torch.Tensor,
    gate_up: Multiply,
    down: Multiply,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    outputs: int,
) -> torch.Tensor:
    """What `fused_experts` computes, one pair of a row and an expert after another; [rows, outputs]."""
    out = x.new_zeros(len(x), outputs, dtype=torch.float32)
    for row, (weights, ids) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if expert >= 0:
                hidden = silu_and_mul_reference(gate_up(expert, x[row : row + 1]).to(x.dtype))
                out[row] += weight * down(expert, hidden)[0]
    return out.to(x.dtype)


@torch.library.register_fake("sgl_kernel::fused_experts")
def _fused_experts_fake(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    intermediate_size: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Only writes into `out`."""

"""Owns the normalisation kernels: the call, what `torch.compile` needs to know, and the torch reference.

Read by callers of `sgl_kernel` and by the tests, which hold the kernel to the reference.
"""

import torch


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """Adds `input` to `residual` and puts the normalised sum into `input`; both are written in place.

    input, residual: [rows, hidden], weight: [hidden], all contiguous, all float32 or all bfloat16.
    """
    torch.ops.sgl_kernel.fused_add_rmsnorm(input, residual, weight, eps)


def fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as (normalised, sum) without writing: the sum is rounded to its dtype, the rest is float32."""
    total = (input.float() + residual.float()).to(residual.dtype)
    scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)
    return (total.float() * scale * weight.float()).to(input.dtype), total


@torch.library.register_fake("sgl_kernel::fused_add_rmsnorm")
def _fused_add_rmsnorm_fake(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Nothing to say about shapes: the operator only writes into its arguments."""

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


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Writes `input / rms(input) * weight` into `out`, which may be `input` itself.

    input, out: [rows, hidden], weight: [hidden], all contiguous, all float32 or all bfloat16.
    """
    torch.ops.sgl_kernel.rmsnorm(input, weight, out, eps)
    return out


def rmsnorm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalises each head of x [rows, heads, dim] in place, weight [dim]; rows may be strided."""
    torch.ops.sgl_kernel.rmsnorm_heads(x, weight, eps)
    return x


def fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as (normalised, sum) without writing: the sum is rounded to its dtype, the rest is float32."""
    total = (input.float() + residual.float()).to(residual.dtype)
    return rmsnorm_reference(total, weight, eps), total


def rmsnorm_reference(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The same as `rmsnorm`, in float32."""
    scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + eps)
    return (input.float() * scale * weight.float()).to(input.dtype)


@torch.library.register_fake("sgl_kernel::fused_add_rmsnorm")
def _fused_add_rmsnorm_fake(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Nothing to say about shapes: the operator only writes into its arguments."""


@torch.library.register_fake("sgl_kernel::rmsnorm")
def _rmsnorm_fake(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::rmsnorm_heads")
def _rmsnorm_heads_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Only writes into `x`."""

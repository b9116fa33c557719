"""Owns the loading of the compiled kernels: importing this registers the operators `torch.ops.sgl_kernel.*`.

Read by whoever wants the fast form of an operation on a CPU. It must not hold kernels: each family has its
file.
"""

import torch

import sgl_kernel._C  # noqa: F401 - registers the operators; after torch, whose libraries it links against
from sgl_kernel import (
    argmax,
    attention,
    elementwise,
    embedding,
    linear,
    linear_int8,
    logprobs,
    moe,
    record,
    sampling,
    shm,
    team,
    trees,
)
from sgl_kernel.norm import fused_add_rmsnorm, rmsnorm, rmsnorm_heads

#: Raised with each change of what callers see: an operator, its arguments, or how packed numbers lie. An
#: engine asks for the one that it was written for.
INTERFACE = 3

__all__ = [
    "INTERFACE",
    "argmax",
    "attention",
    "elementwise",
    "embedding",
    "fused_add_rmsnorm",
    "isa_level",
    "linear",
    "linear_int8",
    "logprobs",
    "moe",
    "record",
    "rmsnorm",
    "rmsnorm_heads",
    "sampling",
    "shm",
    "team",
    "trees",
]


def isa_level() -> str:
    """The instruction set that the kernels run with: `base`, `avx2`, `avx512` or `avx512_vnni_bf16`.

    The best one that the processor has, unless `SGL_KERNEL_ISA` names another before the first call.
    """
    return str(torch.ops.sgl_kernel.isa_level())

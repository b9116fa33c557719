"""Owns which tensors the compiled kernels take: float32 and bfloat16 on a CPU.

Read by layers that have a compiled and a plain way of doing something. It must not decide whether the kernels
are there: `compiled.py` does.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sglang.kernels.compiled import compiled_kernels

__all__ = ["COMPILED_DTYPES", "kernels_for"]

#: Types of activations that every compiled kernel takes.
COMPILED_DTYPES = (torch.float32, torch.bfloat16)


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """`sgl_kernel` where it is used and takes such a tensor, else None."""
    if tensor.dtype not in COMPILED_DTYPES or tensor.device.type != "cpu":
        return None
    return compiled_kernels()

"""What this machine has: devices, CPU features and memory, found without loading torch.

Read by resolution, loaders and layers (`is_cuda()`, `cpu_has_bf16()`). Must not import torch, nor anything
under `srt/utils`.
"""

from sglang.srt.platforms.base import is_cpu_only, is_cuda, is_hip, is_npu, is_xpu
from sglang.srt.platforms.cpu import (
    available_memory_bytes,
    cpu_count,
    cpu_flags,
    cpu_has_bf16,
    return_free_memory,
)

__all__ = [
    "available_memory_bytes",
    "cpu_count",
    "cpu_flags",
    "cpu_has_bf16",
    "is_cpu_only",
    "is_cuda",
    "is_hip",
    "is_npu",
    "is_xpu",
    "return_free_memory",
]

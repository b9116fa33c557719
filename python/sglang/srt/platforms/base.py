"""Which accelerator this machine has, answered by torch if it is loaded and from the system otherwise.

Read by resolution and by whatever chooses kernels. Must not import torch: the server process never loads it,
so there the answer comes from device files and from the version of the installed torch.
"""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")


def _torch() -> ModuleType | None:
    return sys.modules.get("torch")


def _build_suffix() -> str:
    """The local part of the installed torch's version ("cpu", "cu130", "rocm7.1"), without importing it."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    for line in text.splitlines():
        if line.startswith("__version__"):
            return line.partition("+")[2].strip().strip("'\"")
    return ""


def is_cuda() -> bool:
    """Whether torch is a CUDA build and an NVIDIA driver is there."""
    torch = _torch()
    if torch is not None:
        return bool(torch.version.cuda) and bool(torch.cuda.is_available())
    suffix = _build_suffix()
    return _NVIDIA.exists() and suffix != "cpu" and not suffix.startswith(("rocm", "xpu"))


def is_hip() -> bool:
    torch = _torch()
    if torch is not None:
        return bool(torch.version.hip) and bool(torch.cuda.is_available())
    return _AMD.exists() and _build_suffix().startswith("rocm")


def is_xpu() -> bool:
    torch = _torch()
    if torch is not None:
        return hasattr(torch, "xpu") and bool(torch.xpu.is_available())
    return _build_suffix().startswith("xpu")


def is_npu() -> bool:
    return util.find_spec("torch_npu") is not None


def is_cpu_only() -> bool:
    return not (is_cuda() or is_hip() or is_xpu() or is_npu())

"""Which accelerator is here, answered with torch if it is loaded and from the system otherwise.

Read by resolution and by anything that chooses kernels. Must not import torch: a process that has not
loaded it (the server) must be able to ask, so the answer then comes from device files and torch's metadata.
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
    """Local part of the installed torch version ("cpu", "cu130", "rocm7.1"), without importing torch."""
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
    """A CUDA build of torch and an NVIDIA driver: both are needed to run there."""
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

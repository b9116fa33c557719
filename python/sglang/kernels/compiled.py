"""Owns whether the compiled kernels of `sgl_kernel` are used: they are there, and nobody switched them off.

Read by whoever has a compiled and a plain way of doing something. The package is optional; without it the
engine runs in torch, slower.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

#: The `sgl_kernel.INTERFACE` that this engine calls.
_INTERFACE = 3


def are_there() -> bool:
    """Whether the package is installed and not switched off; without importing it, so also free of torch."""
    return envs.SGLANG_USE_CPU_KERNELS.get() and importlib.util.find_spec("sgl_kernel") is not None


@functools.cache
def compiled_kernels() -> ModuleType | None:
    """`sgl_kernel`, or None; decided once a process, and told in one line where it is not used."""
    if not envs.SGLANG_USE_CPU_KERNELS.get():
        logger.info("Compiled kernels are off (SGLANG_USE_CPU_KERNELS=0): the model runs in torch, slower")
        return None
    if importlib.util.find_spec("sgl_kernel") is None:
        logger.info("sgl_kernel is not installed: the model runs in torch, slower; `make kernels` builds it")
        return None
    try:
        kernels = importlib.import_module("sgl_kernel")
        level = kernels.isa_level()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"sgl_kernel is installed and cannot be used ({error}); build it anew for this torch, or set "
            "SGLANG_USE_CPU_KERNELS=0 to run in torch, slower"
        ) from error
    found = getattr(kernels, "INTERFACE", 1)
    if found != _INTERFACE:
        older = "it" if found < _INTERFACE else "the engine"
        raise RuntimeError(
            f"sgl_kernel has interface {found} and this engine needs {_INTERFACE}: {older} is the older one; "
            "`make kernels` builds the one that fits, SGLANG_USE_CPU_KERNELS=0 runs in torch, slower"
        )
    logger.info("Compiled kernels: sgl_kernel at level %s", level)
    return kernels
